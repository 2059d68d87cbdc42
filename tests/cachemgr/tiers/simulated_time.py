"""An event loop whose time jumps to the next timer: what takes minutes is over at once."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def clock() -> float:
    """Of the loop that runs."""
    return asyncio.get_running_loop().time()


def simulate(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it to its end; no task may be left."""

    async def whole() -> T:
        result = await work()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        return result

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(whole())
