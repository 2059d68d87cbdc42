"""How full the GPU is, for the metrics page, asked where nobody waits for the answer.

The driver answers within microseconds, but for as long as it is busy with something large (another thread
loads a plan, or pins memory) or not at all, when the GPU hangs. Metrics are published between deltas of open
streams, so they take what was found last.

Threads: `readings` from one; each question is asked on a short-lived thread of its own, one at a time.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from backend.metrics import Reading
from backend.thread_names import show_thread_name
from engines import DeviceError, DeviceMemoryUse

log = logging.getLogger(__name__)

ASK_EVERY_S: Final = 5.0


class GpuMemory:
    """Bytes in use, whoever uses them."""

    def __init__(self, ask: Callable[[], DeviceMemoryUse], *, clock: Callable[[], float]) -> None:
        """`ask` may block, and may raise DeviceError."""
        self._ask = ask
        self._clock = clock
        self._next = clock()
        self._asking: threading.Thread | None = None
        self._found: DeviceMemoryUse | None = None
        self._failed = False

    def readings(self) -> list[Reading]:
        """What was found last, nothing while nothing is known. Never blocks."""
        now = self._clock()
        if now >= self._next and (self._asking is None or not self._asking.is_alive()):
            self._next = now + ASK_EVERY_S
            self._asking = threading.Thread(target=self._look, name="gpu-memory", daemon=True)
            self._asking.start()
        found = self._found
        if found is None:
            return []
        return [
            Reading("gpu_memory_used_bytes", float(found.used)),
            Reading("gpu_memory_bytes", float(found.total)),
        ]

    def _look(self) -> None:
        show_thread_name()
        try:
            self._found, self._failed = self._ask(), False
        except DeviceError as error:
            if not self._failed:
                log.warning("how full the GPU is cannot be told: %s", error)
            self._found, self._failed = None, True
