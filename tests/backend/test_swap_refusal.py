import pytest

from backend.errors import ConfigError, EngineFailed
from backend.swap_refusal import refusal_of
from engines import DeviceError, DeviceLostError, ReleaseError, StepError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ReleaseError("golden", expected="token 1", found="token 2"), "golden"),
        (StepError("a shape was refused"), "prewarm"),
        (DeviceError("cuStreamCreate failed"), "gpu"),
        (DeviceLostError("GPU 0 is lost"), "gpu"),
        (MemoryError(), "memory"),
        (ConfigError("sampler: no room"), "config"),
        (EngineFailed("the backend stopped"), "step_loop"),
    ],
)
def test_what_can_be_expected_has_a_reason_of_its_own(error: Exception, reason: str) -> None:
    refusal = refusal_of(error)
    assert (refusal.reason, refusal.unexpected) == (reason, False)
    assert (str(error) or "MemoryError") in refusal.text


def test_anything_else_is_our_own_fault_and_says_so() -> None:
    refusal = refusal_of(ZeroDivisionError("division by zero"))
    assert (refusal.reason, refusal.unexpected) == ("internal", True)
