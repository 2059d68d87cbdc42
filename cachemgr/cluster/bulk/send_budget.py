"""How many bytes a server pins for all who read from it; who comes when they are used up waits in order.

Invariants: waiters are served first come, first served, each at most once; their number is bounded; one that
wants more than all gets all. Nobody waits beyond his own deadline.
Threads: the IO thread.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable


class SendBudget:
    """Counts pinned bytes."""

    def __init__(self, nbytes: int, *, waiters: int, loop: asyncio.AbstractEventLoop) -> None:
        self._free = self._all = nbytes
        self._waiters = waiters
        self._loop = loop
        self._waiting: OrderedDict[Waiter, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Bytes given out."""
        return self._all - self._free

    def share(self, nbytes: int) -> int:
        """What `take` counts for a wish of `nbytes`; give back as much."""
        return min(nbytes, self._all)

    def take(self, nbytes: int) -> bool:
        """True if the share is there at once; nobody overtakes those who wait."""
        share = self.share(nbytes)
        if self._waiting or share > self._free:
            return False
        self._free -= share
        return True

    def wait(
        self, nbytes: int, *, seconds: float, granted: Callable[[], None], refused: Callable[[], None]
    ) -> "Waiter | None":
        """Call `granted` when the share was taken, or `refused` when `seconds` are over. None: too many
        wait.
        """
        if len(self._waiting) >= self._waiters:
            return None
        waiter = Waiter(self, self.share(nbytes), granted=granted)
        self._waiting[waiter] = None
        waiter.timer = self._loop.call_later(seconds, self._refuse, waiter, refused)
        return waiter

    def give_back(self, nbytes: int) -> None:
        """What `share` said for the same wish is free again."""
        self._free += self.share(nbytes)
        self._serve()

    def forget(self, waiter: "Waiter") -> None:
        """It does not want it any more."""
        if waiter in self._waiting:
            del self._waiting[waiter]
            waiter.stop()
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            waiter = next(iter(self._waiting))
            if waiter.share > self._free:
                return
            del self._waiting[waiter]
            waiter.stop()
            self._free -= waiter.share
            waiter.granted()

    def _refuse(self, waiter: "Waiter", refused: Callable[[], None]) -> None:
        self.forget(waiter)
        refused()


class Waiter:
    """One who waits; `forget` ends it early."""

    __slots__ = ("_budget", "granted", "share", "timer")

    def __init__(self, budget: SendBudget, share: int, *, granted: Callable[[], None]) -> None:
        self._budget = budget
        self.share = share
        self.granted = granted
        self.timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Its timer is not needed any more."""
        if self.timer is not None:
            self.timer.cancel()

    def forget(self) -> None:
        """It does not want it any more. Idempotent."""
        self._budget.forget(self)
