"""(1) Every logit near torch's: after 1, 31, 32, 33 and S − 1 cached positions and token by token, poison
beyond."""

from tests.gpu import checks
from tests.gpu.node import Node
from tests.gpu.torch_reference import Precision


def test_logits_match_torch(node: Node, precision: Precision) -> None:
    print(checks.logits_match_torch(node.engine(precision), node.reference(precision)))
