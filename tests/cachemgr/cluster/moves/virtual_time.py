"""A loop whose clock jumps to what is due next: minutes of background work in no time, always the same."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps cost nothing; what is to run off the loop runs at once. No sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        look = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            assert timeout is not None, "everything waits, and nothing is ever going to happen"
            self.now += max(timeout, 0.0)
            return look(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        done.set_result(func(*args))
        return done


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main()` in virtual time; tasks it leaves behind are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def clock() -> float:
    """Virtual seconds, monotonic and of the day alike."""
    return asyncio.get_running_loop().time()
