"""(3) A thousand random steps change no byte of a lane that they do not name."""

from tests.gpu import checks
from tests.gpu.node import Node
from tests.gpu.torch_reference import Precision


def test_idle_lanes_keep_their_bytes(node: Node, precision: Precision) -> None:
    print(checks.idle_lanes_keep_their_bytes(node.engine(precision), steps=1000))
