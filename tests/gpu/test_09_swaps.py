"""(9) Ten swaps in a row; memory of device and host stays flat. (7) and (8) are numbers: `make bench-gpu`."""

import pytest

from engines import Engine
from tests.gpu import checks
from tests.gpu.conftest import PRECISIONS
from tests.gpu.node import Node, memory_in_use
from tests.gpu.sampler_checks import device_sampler, sampled_swaps

# the device gives memory out in pieces of 2 MiB, the host's allocator keeps what it may need again; a plan
# that stayed behind would be 270 MB on either side, the lanes of an engine 50 MB
SLACK = {"device": 8 << 20, "host": 64 << 20}


@pytest.mark.parametrize("sampled", [False, True], ids=["bare", "sampled"])
def test_ten_swaps_leave_memory_flat(node: Node, request: pytest.FixtureRequest, sampled: bool) -> None:
    """Two of a precision in a row share KV, the next one does not. Nobody else may use the GPU meanwhile.

    Sampled: torch, too, gives up what it keeps for the streams of engines that are gone.
    """
    node.close()
    precisions = request.config.getoption("--gpu-precision") or PRECISIONS

    def open_next(number: int, serving: Engine | None) -> Engine:
        precision = precisions[number // 2 % len(precisions)]
        return node.open(precision, beside=None if serving is None else serving.spec)

    limit = max(node.reference(precision).limit for precision in precisions)
    opening = sampled_swaps(open_next, device_sampler) if sampled else open_next
    print(checks.swaps_leave_memory_flat(opening, memory_in_use, slack=SLACK, limit=limit))
