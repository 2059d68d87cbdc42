"""Which slot's block comes before which: a tree of slots, so that a front never goes before what needs it.

Four int32 columns: parent, first child, and the siblings beside a slot. The child that was used last is the
first. All is O(1), but for a slot that leaves before its children (its block was corrupt, or moved away): it
lets go of each of them.
"""

import numpy as np


class Families:
    """The tree of slots 0 … capacity − 1."""

    def __init__(self, capacity: int) -> None:
        self.parent = np.full(capacity, -1, np.int32).data
        self.child = np.full(capacity, -1, np.int32).data
        self.after = np.full(capacity, -1, np.int32).data
        self.before = np.full(capacity, -1, np.int32).data

    def join(self, slot: int, parent: int) -> None:
        """`slot` comes after `parent`, and is its first child."""
        first = self.child[parent]
        self.parent[slot] = parent
        self.after[slot] = first
        if first != -1:
            self.before[first] = slot
        self.child[parent] = slot

    def leave(self, slot: int) -> int:
        """`slot` is empty; its parent, -1 if it had none."""
        parent = self.parent[slot]
        if parent != -1:
            self._unlink(slot, parent)
            self.parent[slot] = -1
        child = self.child[slot]
        if child == -1:
            return parent
        self.child[slot] = -1
        while child != -1:
            after = self.after[child]
            self.parent[child] = self.after[child] = self.before[child] = -1
            child = after
        return parent

    def favour(self, slot: int, parent: int) -> None:
        """`slot` was used and is the first child of its parent again."""
        self._unlink(slot, parent)
        self.join(slot, parent)

    def _unlink(self, slot: int, parent: int) -> None:
        before, after = self.before[slot], self.after[slot]
        if before != -1:
            self.after[before] = after
        elif self.child[parent] == slot:
            self.child[parent] = after
        if after != -1:
            self.before[after] = before
        self.before[slot] = self.after[slot] = -1
