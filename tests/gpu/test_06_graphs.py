"""(6) Steps played from CUDA graphs against steps launched kernel by kernel."""

from tests.gpu import checks
from tests.gpu.node import Node
from tests.gpu.torch_reference import Precision


def test_cuda_graphs_change_nothing(node: Node, precision: Precision) -> None:
    captured, plain = node.engine(precision), node.engine(precision, cuda_graphs=False)
    print(checks.graphs_change_nothing(captured, plain, limit=node.reference(precision).limit))
