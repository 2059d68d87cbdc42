"""Which blocks were offered lately, so that a block that is used all the time is not offered all the time.

Two sets of names: the young one takes what is offered, and takes the old one's place after a while. What is
in either was offered no longer ago than `memory_s`; what is in neither may have been. Bounded in names.

Threads: the IO loop.
"""

from collections.abc import Callable

from cachemgr.contract import BlockHash

MOST_NAMES = 65_536
"""In each set: about 6 MiB."""


class OfferedLately:
    """`clock`: monotonic seconds."""

    def __init__(self, memory_s: float, *, clock: Callable[[], float]) -> None:
        self._turn_s = memory_s / 2
        self._clock = clock
        self._young: set[BlockHash] = set()
        self._old: set[BlockHash] = set()
        self._turns_at = clock() + self._turn_s

    def __contains__(self, name: BlockHash) -> bool:
        self._turn()
        return name in self._young or name in self._old

    def add(self, name: BlockHash) -> None:
        """It was offered now."""
        self._turn()
        if len(self._young) >= MOST_NAMES:
            self._turns_at = self._clock()
            self._turn()
        self._young.add(name)

    def forget(self, name: BlockHash) -> None:
        """It is not there, whatever was offered."""
        self._young.discard(name)
        self._old.discard(name)

    def clear(self) -> None:
        """None of them may be there."""
        self._young.clear()
        self._old.clear()

    def _turn(self) -> None:
        now = self._clock()
        if now < self._turns_at:
            return
        late = now >= self._turns_at + self._turn_s
        self._old, self._young = (set() if late else self._young), set()
        self._turns_at = now + self._turn_s
