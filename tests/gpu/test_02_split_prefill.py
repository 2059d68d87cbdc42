"""(2) A prompt in parts against the same prompt whole."""

from tests.gpu import checks
from tests.gpu.node import Node
from tests.gpu.torch_reference import Precision


def test_split_prefill_equals_whole(node: Node, precision: Precision) -> None:
    print(checks.split_equals_whole(node.engine(precision), limit=node.reference(precision).limit))
