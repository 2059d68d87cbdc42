"""Which block goes next: leaf first along a chain, deeper segments first, least recently used between chains.

One list from least to most recently used holds exactly the blocks that may go. Leaf-first falls out of its
order: the blocks of a chain are offered deepest first, so a parent is always more recent than its children,
and a block that is committed is put just before its parent. The list's least recent end is therefore always
a leaf of what it holds, and no block is ever searched for: every operation is O(1).
"""

import numpy as np
import numpy.typing as npt


class LeafFirstLru:
    """The base policy: a doubly linked list in two int32 columns, its sentinel at index `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._sentinel = capacity
        self._newer_column = np.full(capacity + 1, -1, np.int32)
        self._older_column = np.full(capacity + 1, -1, np.int32)
        # Scalar access through a memoryview costs a third of numpy's; the columns serve vectorised writes.
        self._newer = self._newer_column.data
        self._older = self._older_column.data
        self._newer[capacity] = self._older[capacity] = capacity

    def offer(self, slot: int, *, parent: int | None = None) -> None:
        """`slot` was just used and may be evicted from now on, before `parent` if that may be evicted too."""
        before = self._sentinel if parent is None or parent not in self else parent
        self._link(slot, newer=before)

    def offer_many(self, slots: npt.NDArray[np.int32]) -> None:
        """Offer distinct slots in the order given, as if one by one."""
        if not len(slots):
            return
        last = self._older[self._sentinel]
        self._newer_column[slots[:-1]] = slots[1:]
        self._older_column[slots[1:]] = slots[:-1]
        oldest, newest = int(slots[0]), int(slots[-1])
        self._older[oldest], self._newer[last] = last, oldest
        self._newer[newest], self._older[self._sentinel] = self._sentinel, newest

    def offer_first(self, slot: int) -> None:
        """`slot` may be evicted, and before everything else."""
        self._link(slot, newer=self._newer[self._sentinel])

    def withdraw(self, slot: int) -> None:
        """`slot` may not be evicted any more: it is pinned or gone."""
        newer, older = self._newer[slot], self._older[slot]
        self._newer[older], self._older[newer] = newer, older
        self._newer[slot] = self._older[slot] = -1

    def victim(self) -> int | None:
        """The slot that should go next; it stays in the order. None if none may go."""
        slot = self._newer[self._sentinel]
        return None if slot == self._sentinel else slot

    def __contains__(self, slot: int) -> bool:
        return self._newer[slot] != -1

    def _link(self, slot: int, *, newer: int) -> None:
        older = self._older[newer]
        self._older[slot], self._newer[slot] = older, newer
        self._newer[older] = self._older[newer] = slot
