"""(4) A lane bound alone (B = 1) against its row of a batch."""

from tests.gpu import checks
from tests.gpu.node import Node
from tests.gpu.torch_reference import Precision


def test_lane_slice_equals_batch_row(node: Node, precision: Precision) -> None:
    print(checks.lane_slice_equals_batch_row(node.engine(precision), limit=node.reference(precision).limit))


def test_a_lane_that_held_nan_answers_again(node: Node, precision: Precision) -> None:
    print(checks.nan_lanes_answer_again(node.engine(precision), limit=node.reference(precision).limit))
