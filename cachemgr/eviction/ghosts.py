"""What is remembered of blocks that went: how often they were seen, and when last.

One entry stands for a group of blocks (groups.py): they share their fate. The table is set-associative like a
processor's cache: a fingerprint picks a row of four, the longest unused of them gives way. Entries are
numbers in columns, 11 bytes each; there are at most as many as slots.
"""

from typing import NamedTuple

import numpy as np

_WAYS = 4


class Ghost(NamedTuple):
    """A group that went."""

    epoch: int
    """When it was last used."""
    kind: int
    seen: int
    followers: int
    """So many blocks of the group after its first one were here as well."""


class Ghosts:
    """Entries for `capacity` slots."""

    def __init__(self, capacity: int) -> None:
        self._rows = capacity // _WAYS
        entries = self._rows * _WAYS
        self._marks = np.zeros(entries, np.uint32).data
        self._epochs = np.zeros(entries, np.int32).data
        self._kinds = np.zeros(entries, np.uint8).data
        self._counts = np.zeros(entries, np.uint8).data
        self._followers = np.zeros(entries, np.uint8).data
        self.held = 0
        self.hits = 0

    def find(self, mark: int) -> Ghost | None:
        """What is remembered under a fingerprint."""
        entry = self._find(mark)
        return None if entry is None else self._at(entry)

    def take(self, mark: int) -> Ghost | None:
        """The same, and it is remembered no longer: it came back."""
        entry = self._find(mark)
        if entry is None:
            return None
        ghost = self._at(entry)
        self._marks[entry] = 0
        self.held -= 1
        self.hits += 1
        return ghost

    def put(self, mark: int, ghost: Ghost) -> Ghost | None:
        """Remember; what had to be forgotten for it."""
        if not self._rows:
            return ghost
        row = mark % self._rows * _WAYS
        marks, epochs = self._marks, self._epochs
        entry, oldest = row, 1 << 62
        for at in range(row, row + _WAYS):
            if not marks[at]:
                entry = at
                break
            if epochs[at] < oldest:
                entry, oldest = at, epochs[at]
        lost = self._at(entry) if marks[entry] else None
        self.held += lost is None
        marks[entry], epochs[entry] = mark, ghost.epoch
        self._kinds[entry], self._counts[entry] = ghost.kind, ghost.seen
        self._followers[entry] = ghost.followers
        return lost

    def lengthen(self, mark: int, *, most: int) -> None:
        """One block more followed."""
        entry = self._find(mark)
        if entry is not None:
            self._followers[entry] = min(self._followers[entry] + 1, most)

    def _find(self, mark: int) -> int | None:
        if not self._rows:
            return None
        row = mark % self._rows * _WAYS
        marks = self._marks
        for at in range(row, row + _WAYS):
            if marks[at] == mark:
                return at
        return None

    def _at(self, entry: int) -> Ghost:
        return Ghost(self._epochs[entry], self._kinds[entry], self._counts[entry], self._followers[entry])
