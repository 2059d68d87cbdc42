"""The door to TensorRT: loads it once a driver answered, keeps what it logs, turns plans into engines.

TensorRT reports by None, False, and a line in its log; the log is kept here so that an error can say the
reason. One code path serves every TensorRT from 10.15 to 11: nothing here or in its users names a member
that only one of them has, and no enum is ever compared by number.

Threads: any; TensorRT logs from threads of its own.
"""

import functools
import logging
import threading
from collections import deque
from typing import Any

from engines.driver import GPU_EXTRAS, require_driver
from engines.errors import DeviceError, ReleaseError

log = logging.getLogger(__name__)

_KEPT_MESSAGES = 32
_SHOWN_MESSAGES = 3


class Messages:
    """TensorRT's last warnings and errors, numbered, so that a caller can ask for those after a point."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a deque must not grow while it is read
        self._kept: deque[tuple[int, str]] = deque(maxlen=_KEPT_MESSAGES)
        self._count = 0

    def add(self, message: str) -> None:
        """Keep one message; the oldest goes when there are too many."""
        with self._lock:
            self._count += 1
            self._kept.append((self._count, " ".join(message.split())))

    @property
    def count(self) -> int:
        """How many there have been: the point to ask after."""
        return self._count

    def after(self, point: int) -> str:
        """The last few messages after `point`, oldest first, in one line."""
        with self._lock:
            found = [text for number, text in self._kept if number > point]
        return "; ".join(found[-_SHOWN_MESSAGES:]) or "no reason in TensorRT's log"


messages = Messages()


def load_tensorrt() -> Any:
    """The module `tensorrt`. DeviceError says what to install where there is no driver or no TensorRT."""
    require_driver()
    try:
        import tensorrt
    except ImportError as error:
        raise DeviceError(
            f"TensorRT: expected its Python package, found none ({error}): {GPU_EXTRAS}"
        ) from error
    return tensorrt


def library_version() -> str:
    """The version of the library that would run a plan, such as "10.16.0.72"."""
    return str(load_tensorrt().__version__)


@functools.cache
def trt_logger() -> Any:
    """The one ILogger of this process: TensorRT keeps the first that it is given."""
    tensorrt = load_tensorrt()
    severity = tensorrt.ILogger.Severity
    names = {
        severity.INTERNAL_ERROR: "internal error",
        severity.ERROR: "error",
        severity.WARNING: "warning",
    }

    class KeepingLogger(tensorrt.ILogger):  # type: ignore[misc, name-defined]
        """Keeps warnings and errors; passes everything on at level debug."""

        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            """Called by TensorRT, from any thread."""
            if severity in names:
                messages.add(f"{names[severity]}: {msg}")
            log.debug("tensorrt: %s", msg)

    return KeepingLogger()


def last_messages() -> str:
    """What TensorRT last warned of or failed at, in one line."""
    return messages.after(0)


def deserialise(plan: memoryview) -> tuple[Any, Any]:
    """(runtime, engine) of a plan whose header was checked; the runtime must outlive the engine.

    The device's context must be current. ReleaseError (step "deserialise") gives TensorRT's reason.
    """
    tensorrt = load_tensorrt()
    point = messages.count
    runtime = tensorrt.Runtime(trt_logger())
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ReleaseError(
            "deserialise",
            expected=f"a plan that TensorRT {tensorrt.__version__} loads",
            found=messages.after(point),
        )
    return runtime, engine
