"""Everything that can go wrong in engines, as one tree.

EngineError
├── BuildError      weights or options that no engine can be built from
├── DeviceError     no driver, no GPU, no GPU library, or a call of the driver that failed
│   ├── DeviceMemoryError   the GPU, or page-locked host memory, is full
│   └── DeviceLostError     a kernel or the GPU itself broke: nothing works any more in this process
├── ReleaseError    a release the load chain refuses (signature, name, age, bytes, contract, golden token)
└── StepError       a prefill or decode that failed; the batch it hit fails, the next request works
"""


_SHOWN = 600


class EngineError(Exception):
    """Root of the tree; its text is one line that a user can act on."""


class BuildError(EngineError):
    """The weights or the options cannot become an engine; names the field and what is supported."""

    def __init__(self, text: str) -> None:
        super().__init__(_one_line(text))


class DeviceError(EngineError):
    """The GPU cannot be used, or a call of its driver failed; says what to install if that helps."""


class DeviceMemoryError(DeviceError):
    """There is no room left for an allocation on the device, or for one in page-locked host memory."""


class DeviceLostError(DeviceError):
    """The driver repeats what broke before (such as an illegal address) at every call, for good.

    No step of any engine on this GPU can succeed any more: whoever runs them stops, so that the process is
    replaced.
    """


class ReleaseError(EngineError):
    """A step of the load chain refused; `step`, `expected` and `found` say which and why."""

    def __init__(self, step: str, *, expected: str, found: str) -> None:
        found = _one_line(found)
        super().__init__(f"{step}: expected {expected}, found {found}")
        self.step = step
        self.expected = expected
        self.found = found


class StepError(EngineError):
    """A step failed inside the runtime; the engine itself stays usable."""


def _one_line(text: str) -> str:
    """Messages of libraries have many lines, and quote what they found, which may be anything."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = ascii(line)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
