"""What is where: block hash → slot, and a row of columns per slot.

A slot is free, reserved (being written; its name is announced, not visible) or resident. A resident slot
has a name, or none: nameless ones hold shards that only another process can read, kept but never found.

Invariants
- `_slots[name] == slot` if and only if `_names[slot]` is that name.
- `last_used` is +inf while a slot is pinned: a pinned block never expires.

Threads: no lock inside; the cache's one lock guards every call.
"""

from collections.abc import Iterator, MutableSequence, Sequence
from math import inf
from typing import cast

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.name_map import NameMap


class BlockIndex:
    """Names and columns for `capacity` slots; about 150 bytes per resident block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pinned = 0
        self._slots = NameMap(capacity)
        self._names = np.full(capacity, None, np.object_)
        self._reserved: dict[BlockHash, int] = {}
        self._fresh: list[range] = []
        self._free: list[int] = []
        self._depth_column = np.zeros(capacity, np.uint32)
        self._last_used_column = np.zeros(capacity, np.float64)
        # Scalar access through a memoryview costs a third of numpy's; the columns serve vectorised access.
        self._depth = self._depth_column.data
        self._last_used = cast("MutableSequence[float]", self._last_used_column.data)
        self._pins = np.zeros(capacity, np.uint32).data

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, name: BlockHash) -> int | None:
        """The slot of a resident block."""
        return self._slots.get(name)

    def is_reserved(self, name: BlockHash) -> bool:
        """True while a block of this name is being written."""
        return name in self._reserved

    def run(self, names: Sequence[BlockHash], *, used_after: float) -> list[int]:
        """Slots of the longest leading run of `names` that is resident and was used after that time."""
        slots: list[int] = []
        for name in names:
            slot = self._slots.get(name)
            if slot is None:
                break
            slots.append(slot)
        expired = self._last_used_column[slots] <= used_after if slots else np.zeros(0, np.bool_)
        return slots[: int(expired.argmax())] if expired.any() else slots

    def name(self, slot: int) -> BlockHash | None:
        """The name of a resident slot."""
        name: BlockHash | None = self._names[slot]
        return name

    def depth(self, slot: int) -> int:
        """The position of the slot's block in its chain."""
        return self._depth[slot]

    def last_used(self, slot: int) -> float:
        """When the slot was last used; +inf while it is pinned."""
        return self._last_used[slot]

    def touch(self, slot: int, *, now: float) -> None:
        """The slot was used just now."""
        self._last_used[slot] = now

    def pin(self, slot: int) -> bool:
        """Count one more reader; True if it is the first."""
        self._pins[slot] += 1
        self.pinned += 1
        self._last_used[slot] = inf
        return self._pins[slot] == 1

    def unpin(self, slot: int, *, now: float) -> bool:
        """Count one reader less; True if it was the last."""
        self._pins[slot] -= 1
        self.pinned -= 1
        if self._pins[slot]:
            return False
        self._last_used[slot] = now
        return True

    def pins(self, slot: int) -> int:
        """Readers of the slot."""
        return self._pins[slot]

    def add_slots(self, slots: range) -> None:
        """Take in slots that hold nothing; a range costs no memory until its slots are used."""
        if len(slots):
            self._fresh.append(slots)

    def free(self, slot: int) -> None:
        """The slot holds nothing any more."""
        self.forget(slot)
        self._free.append(slot)

    def forget(self, slot: int) -> None:
        """Take the slot's name away, so that nobody finds it; its bytes stay."""
        name = self._names[slot]
        if name is not None:
            self._names[slot] = None
            self._slots.remove(name)

    def has_free(self) -> bool:
        """True if `reserve` will succeed."""
        return bool(self._free or self._fresh)

    def reserve(self, name: BlockHash) -> int:
        """A free slot for a block that is going to be written under `name`."""
        slot = self._free.pop() if self._free else self._pop_fresh()
        self._reserved[name] = slot
        return slot

    def fulfil(self, name: BlockHash, *, depth: int, now: float) -> None:
        """The reserved block is written: make it resident."""
        self.insert(name, self._reserved.pop(name), depth=depth, now=now)

    def cancel(self, name: BlockHash) -> int:
        """The reserved block will not be written: free its slot, and say which."""
        self._free.append(self._reserved.pop(name))
        return self._free[-1]

    def insert(self, name: BlockHash, slot: int, *, depth: int, now: float) -> None:
        """Make `slot`, which is neither free nor resident, resident under a new `name`."""
        if self._slots.insert(name, slot):
            self._names[slot] = name
        self._depth[slot] = depth
        self._last_used[slot] = now

    def insert_many(
        self,
        names: Sequence[BlockHash],
        slots: npt.NDArray[np.int32],
        *,
        depths: npt.NDArray[np.uint32],
        now: float,
    ) -> npt.NDArray[np.bool_]:
        """Insert many; False where the name is resident already, and the slot therefore is not."""
        new = np.array(self._slots.insert_many(names, slots.tolist()), np.bool_)
        if new.all():
            self._names[slots] = names
        else:
            rows = np.flatnonzero(new)
            self._names[slots[rows]] = [names[row] for row in rows]
        inserted = slots[new]
        self._depth_column[inserted] = depths[new]
        self._last_used_column[inserted] = now
        return new

    def _pop_fresh(self) -> int:
        slots = self._fresh.pop()
        self.add_slots(slots[1:])
        return slots[0]

    def resident(self) -> Iterator[tuple[BlockHash, int]]:
        """Every named block; O(n), for checks and tests."""
        return self._slots.items()

    def free_slots(self) -> set[int]:
        """Every slot that holds nothing; O(n), for checks and tests."""
        return set(self._free).union(*self._fresh)

    def reserved_slots(self) -> list[int]:
        """Every slot that is being written."""
        return list(self._reserved.values())
