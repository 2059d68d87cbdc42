"""One list per class, from least to most recently used, of exactly the slots that may go.

Doubly linked in two int32 columns; the sentinels stand behind the slots. A slot is in one list at most, so
several sets of lists, each with sentinels of its own, share the columns. Every operation is O(1).
"""

from copy import copy

import numpy as np
import numpy.typing as npt


class ClassLists:
    """The first of `sets` sets of `lists` lists of slots 0 … capacity − 1."""

    def __init__(self, capacity: int, lists: int, *, sets: int = 1) -> None:
        self._lists = lists
        self.first_sentinel = capacity
        end = capacity + sets * lists
        self._newer_column = np.full(end, -1, np.int32)
        self._older_column = np.full(end, -1, np.int32)
        # Scalar access through a memoryview costs a third of numpy's; the columns serve vectorised writes.
        self.newer = self._newer_column.data
        self.older = self._older_column.data
        for sentinel in range(capacity, end):
            self.newer[sentinel] = self.older[sentinel] = sentinel

    def another(self, number: int) -> "ClassLists":
        """Set `number` of the lists that share these columns; this one is set 0."""
        lists = copy(self)
        lists.first_sentinel = self.first_sentinel + number * self._lists
        return lists

    def take_all(self, other: "ClassLists") -> None:
        """What another set has is less recent than all of ours; from then on `other` is the same set."""
        newer, older = self.newer, self.older
        for which in range(self._lists):
            sentinel, emptied = self.first_sentinel + which, other.first_sentinel + which
            first, last, after = newer[emptied], older[emptied], newer[sentinel]
            if first != emptied:
                newer[sentinel], older[first] = first, sentinel
                newer[last], older[after] = after, last
                newer[emptied] = older[emptied] = emptied
        other.first_sentinel = self.first_sentinel

    def append(self, slot: int, which: int) -> None:
        """`slot` is the most recent of a list."""
        self.link(slot, newer=self.first_sentinel + which)

    def prepend(self, slot: int, which: int) -> None:
        """`slot` is the least recent of a list."""
        self.link(slot, newer=self.newer[self.first_sentinel + which])

    def link(self, slot: int, *, newer: int) -> None:
        """`slot` stands just before another slot, or before a sentinel."""
        older = self.older[newer]
        self.older[slot], self.newer[slot] = older, newer
        self.newer[older] = self.older[newer] = slot

    def append_many(self, slots: npt.NDArray[np.int32], which: int) -> None:
        """As if one by one."""
        sentinel = self.first_sentinel + which
        last = self.older[sentinel]
        self._newer_column[slots[:-1]] = slots[1:]
        self._older_column[slots[1:]] = slots[:-1]
        oldest, newest = int(slots[0]), int(slots[-1])
        self.older[oldest], self.newer[last] = last, oldest
        self.newer[newest], self.older[sentinel] = sentinel, newest

    def remove(self, slot: int) -> None:
        """`slot` is in no list any more."""
        newer, older = self.newer[slot], self.older[slot]
        self.newer[older], self.older[newer] = newer, older
        self.newer[slot] = self.older[slot] = -1

    def least_recent(self, which: int) -> int | None:
        """The first of a list."""
        slot = self.newer[self.first_sentinel + which]
        return slot if slot < self.first_sentinel else None

    def check_integrity(self, sets: npt.NDArray[np.uint8]) -> None:
        """AssertionError unless every slot is in a list of its set, or in none; of all sets, O(n)."""
        for sentinel in range(self.first_sentinel, len(self.newer)):
            slot, before = self.newer[sentinel], sentinel
            while slot != sentinel:
                own = (sentinel - self.first_sentinel) // self._lists
                assert sets[slot] == own, f"slot {slot} of set {sets[slot]} is in a list of {own}"
                assert self.older[slot] == before, f"slot {slot} is linked one way"
                slot, before = self.newer[slot], slot

    def __contains__(self, slot: int) -> bool:
        return self.newer[slot] != -1
