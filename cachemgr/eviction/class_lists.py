"""One list per class, from least to most recently used, of exactly the slots that may go.

Doubly linked in two int32 columns; the sentinel of list n stands at index capacity + n. Every operation is
O(1).
"""

import numpy as np
import numpy.typing as npt


class ClassLists:
    """`lists` lists of slots 0 … capacity − 1."""

    def __init__(self, capacity: int, lists: int) -> None:
        self.first_sentinel = capacity
        self._newer_column = np.full(capacity + lists, -1, np.int32)
        self._older_column = np.full(capacity + lists, -1, np.int32)
        # Scalar access through a memoryview costs a third of numpy's; the columns serve vectorised writes.
        self.newer = self._newer_column.data
        self.older = self._older_column.data
        for sentinel in range(capacity, capacity + lists):
            self.newer[sentinel] = self.older[sentinel] = sentinel

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

    def __contains__(self, slot: int) -> bool:
        return self.newer[slot] != -1
