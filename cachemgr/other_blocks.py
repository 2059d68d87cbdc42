"""What the arenas of this node's other processes hold: block hash → a slot that only its writer may change.

Their slots are numbered from `FIRST_OTHER_SLOT` up, so that a run of slots can mix them with our own.
They are never pinned, erased or evicted from here: their writer may reuse one at any moment, so an entry is
a hint and the check of the copy decides. An entry expires when this process has not used it for the TTL.
Of two processes that hold a block the one found last counts; when that copy goes, the other is not searched
for, and the block is a miss.

Threads: no lock inside; the cache's one lock guards every call.
"""

from collections.abc import Sequence

from cachemgr.contract import BlockHash
from cachemgr.index import BlockIndex

FIRST_OTHER_SLOT = 1 << 40


class OtherBlocks:
    """Two dictionaries; about 250 bytes per block, none while no other process serves."""

    def __init__(self) -> None:
        self._slots: dict[BlockHash, int] = {}
        self._used: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def has(self, name: BlockHash, *, used_after: float) -> bool:
        """True if another process holds the block."""
        return self.find(name, used_after=used_after) is not None

    def find(self, name: BlockHash, *, used_after: float) -> int | None:
        """The slot of a block found here and used after that time."""
        slot = self._slots.get(name)
        return slot if slot is not None and self._used[slot] > used_after else None

    def run(self, names: Sequence[BlockHash], *, used_after: float) -> list[int]:
        """Slots of the longest leading run of `names` found here and used after that time."""
        slots: list[int] = []
        for name in names:
            slot = self._slots.get(name)
            if slot is None or self._used[slot] <= used_after:
                break
            slots.append(slot)
        return slots

    def touch(self, slot: int, *, now: float) -> None:
        """A slot that `run` just returned is being used."""
        self._used[slot] = now

    def add(self, name: BlockHash, slot: int, *, now: float) -> None:
        """Another process published `name` in `slot`; the latest of two slots counts."""
        before = self._slots.get(name)
        if before is not None:
            del self._used[before]
        self._slots[name] = slot
        self._used[slot] = now

    def remove(self, name: BlockHash, slot: int) -> bool:
        """`slot` does not hold `name` any more; False if nobody said it did."""
        if self._slots.get(name) != slot:
            return False
        del self._slots[name], self._used[slot]
        return True


def mixed_run(
    names: Sequence[BlockHash], own: BlockIndex, others: OtherBlocks, *, used_after: float
) -> list[int]:
    """Slots of the longest leading run of `names`, ours and others' in turn; the caller holds the lock."""
    slots = own.run(names, used_after=used_after)
    while len(others) and len(slots) < len(names):
        theirs = others.run(names[len(slots) :], used_after=used_after)
        if not theirs:
            break
        slots += theirs
        slots += own.run(names[len(slots) :], used_after=used_after)
    return slots
