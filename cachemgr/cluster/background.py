"""Work that goes on beside requests: looked after again and again, woken early, slowed down, ended cleanly.

Threads: the IO thread.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_AFTER_FAILURE_S = 5.0
_SHORTEST_PAUSE_S = 0.001
"""Timers fire a hair early: without a pause, work that is due in no time would look for it until then."""


class Background:
    """Calls `look` for as long as it runs; `look` returns the seconds until it wants to be called again.

    What `look` raises is our own bug: it is logged, counted in `failures`, and `look` is called again later.
    """

    def __init__(self, name: str, look: Callable[[], Awaitable[float]]) -> None:
        self.failures = 0
        self._name = name
        self._look = look
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running loop."""
        self._task = asyncio.create_task(self._go_on(), name=self._name)

    def wake(self) -> None:
        """Look again as soon as the look under way, if any, is over."""
        self._woken.set()

    async def close(self) -> None:
        """Stop at the next await, and wait for that. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})  # awaited itself, its end would hide that we are cancelled

    async def restart(self) -> None:
        """End the look under way, and begin anew; nothing if it does not run."""
        if self._task is not None:
            await self.close()
            self.start()

    async def _go_on(self) -> None:
        while True:
            self._woken.clear()
            try:
                pause = await self._look()
            except Exception:
                log.exception("%s: failed; going on in %g s", self._name, _AFTER_FAILURE_S)
                self.failures += 1
                pause = _AFTER_FAILURE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause, _SHORTEST_PAUSE_S)):  # wait_for may swallow a cancel
                    await self._woken.wait()


class Pace:
    """Holds copying to so many bytes per second: over any time t no more than rate × t and one batch."""

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._paid_at = 0.0

    async def spend(self, nbytes: int) -> None:
        """Wait until what was spent before is paid for, then spend `nbytes`."""
        now = self._clock()
        starts_at = max(now, self._paid_at)
        self._paid_at = starts_at + nbytes / self._bytes_per_s
        if starts_at > now:
            await asyncio.sleep(starts_at - now)
