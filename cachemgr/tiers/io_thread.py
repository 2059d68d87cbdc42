"""The IO thread: one asyncio loop on a thread of its own, and the way in for everyone else.

Threads: `call` and `close` by any but itself.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_JOIN_S = 10.0

log = logging.getLogger(__name__)


class IoThread:
    """Runs from the moment it is made until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]], *, limit_s: float) -> T:
        """What `work` returns or raises on the loop; after `limit_s` it is cancelled, and TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(work(), self.loop)
        try:
            return future.result(limit_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"{self._thread.name}: no answer within {limit_s:g} s") from None

    def spawn(self, work: Awaitable[None]) -> None:
        """Run `work` beside everything else, from the loop; what it raises is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def close(self) -> None:
        """Cancel what still runs, end the loop and the thread. Idempotent."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            log.error("%s did not end within %g s", self._thread.name, _JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work beside requests failed", exc_info=error)
