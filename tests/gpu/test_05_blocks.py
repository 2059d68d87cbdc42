"""(5) Blocks out and in, bit for bit, while another stream computes."""

from tests.gpu import checks
from tests.gpu.busy import BusyStream
from tests.gpu.node import Node
from tests.gpu.torch_reference import Precision


def test_blocks_round_trip_beside_another_stream(node: Node, precision: Precision) -> None:
    limit = node.reference(precision).limit
    print(checks.blocks_round_trip(node.engine(precision), load=BusyStream(), limit=limit))
