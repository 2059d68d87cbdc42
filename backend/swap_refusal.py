"""Why a swap did not happen, in words and in one label; and nothing that keeps memory.

An exception holds the frames it passed through, and those hold what was read and opened so far: gigabytes,
for as long as somebody keeps it. So its text is taken, and it goes.
"""

from dataclasses import dataclass

from backend.errors import BackendError, ConfigError
from cachemgr import CacheError
from engines import DeviceError, ReleaseError, StepError

DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`reason` is a metric's label: the step of the load chain, or what else went wrong."""

    reason: str
    text: str
    unexpected: bool = False


def refusal_of(error: BaseException) -> Refusal:
    """What an exception of the load chain, or of our own code, says."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ReleaseError):
        return Refusal(error.step, text)
    if isinstance(error, StepError):
        return Refusal("prewarm", f"prewarm: {text}")
    if isinstance(error, DeviceError):
        return Refusal("gpu", f"gpu: {text}")
    if isinstance(error, MemoryError):
        return Refusal("memory", f"memory: {text}")
    if isinstance(error, ConfigError):
        return Refusal("config", text)
    if isinstance(error, CacheError):
        return Refusal("cache", text)
    if isinstance(error, BackendError):
        return Refusal("step_loop", text)
    if isinstance(error, DrainTimeout):
        return Refusal(DRAIN, text)
    return Refusal("internal", f"{type(error).__name__}: {text}", unexpected=True)


class DrainTimeout(Exception):
    """Live sequences did not end in time."""
