"""Lets the loop wait, with a bound, for what a thread does."""

import asyncio
import threading
from contextlib import suppress


class Ending:
    """Made on the loop; `reach` it on any thread; `wait` on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reached = self._loop.create_future()

    @property
    def reached(self) -> bool:
        """True once the loop has heard of it."""
        return self._reached.done()

    def reach(self) -> None:
        """It has happened."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set)

    async def wait(self, limit_s: float) -> bool:
        """True if it happened in time."""
        await asyncio.wait({self._reached}, timeout=max(0.0, limit_s))
        return self._reached.done()

    def _set(self) -> None:
        if not self._reached.done():
            self._reached.set_result(None)


def joined(thread: threading.Thread) -> bool:
    """For a thread that has said that it ends: waits for its last instructions."""
    thread.join(1.0)
    return not thread.is_alive()
