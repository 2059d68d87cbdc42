"""One event loop for all inputs of a process, and an end of a stream that is fed from memory."""

import asyncio
import atexit
import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from cachemgr.cluster.bulk.streams import Buffer, StreamEnded

T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def run(what: Coroutine[Any, Any, T]) -> T:
    """To its end; AssertionError if a task is left."""
    loop = _loop()
    try:
        result = loop.run_until_complete(what)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
    assert not left, f"left running: {left}"
    return result


class FedStream:
    """A Stream over `data`, which comes in pieces of at most `piece` bytes, and then ends."""

    def __init__(self, data: bytes, *, piece: int) -> None:
        self._data = memoryview(data)
        self._piece = piece
        self._turn = False
        self.sent = 0

    def try_receive(self, into: memoryview) -> int:
        self._turn = not self._turn
        if self._turn and self._piece < 256:
            return 0  # nothing there yet
        count = min(len(into), len(self._data), self._piece)
        if not count:
            raise StreamEnded("the end")
        into[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    async def receivable(self, wanted: int) -> None:
        await asyncio.sleep(0)

    def try_send(self, views: Iterable[Buffer]) -> int:
        count = sum(len(view) for view in views)
        self.sent += count
        return count

    def when_sendable(self, callback: Callable[[], None]) -> None:
        raise AssertionError("everything is taken")

    def not_sending(self) -> None:
        pass

    def close(self) -> None:
        pass
