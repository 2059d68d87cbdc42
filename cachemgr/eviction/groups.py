"""Which blocks of a chain are remembered and counted as one, and how many of a group are gone.

A group begins where something new hangs on what was known before: with the first block of a chain, with what
follows blocks that were seen before, at a fork; and anew after `GROUP` blocks. So the blocks of a group came
together, they come back together, and only the first of them is remembered.

Blocks go from the end of a group. What went last after a block is known by its fingerprint there: when it
comes again, it belongs to the group as before; another block in its place begins one.
"""

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash

GROUP = 16
"""Blocks that are remembered as one, at most."""


class Groups:
    """Of slots 0 … capacity − 1: 4 bytes each."""

    def __init__(self, capacity: int) -> None:
        self._places_column = np.zeros(capacity, np.uint8)
        self.places = self._places_column.data
        """Of a slot in its group; 0: it begins one."""
        self.gone = np.zeros(capacity, np.uint8).data
        """So many blocks of its group after this one were here and are gone."""
        self.gone_marks = np.zeros(capacity, np.uint16).data
        """Fingerprint of the first of those; 0: any."""

    def place_of(self, mark: int, parent: int | None, *, known: bool) -> int:
        """The place of a new block in its group; 0: it begins one.

        `known`: the block before it was seen more than once, or something else follows it.
        """
        if parent is None:
            return 0
        place = self.places[parent] + 1
        if place >= GROUP:
            return 0
        if self.gone[parent]:
            return place if self.gone_marks[parent] in (0, mark) else 0
        return 0 if known else place

    def follow(self, parent: int) -> int:
        """A block is back after `parent`: how many of those after it are gone still."""
        gone = self.gone[parent] - 1
        self.gone[parent] = 0
        return gone

    def lengthen(self, parent: int) -> None:
        """One more block after `parent` does not come."""
        self.gone[parent] = min(self.gone[parent] + 1, GROUP - 1)

    def enter_many(
        self, slots: npt.NDArray[np.int32], depths: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.bool_]:
        """Of blocks found written nothing but their depth is known; which of them begin a group."""
        places = depths % GROUP
        self._places_column[slots] = places
        leads: npt.NDArray[np.bool_] = places == 0
        return leads


def mark_of(name: BlockHash) -> int:
    """A fingerprint of 16 bits, to tell the few apart that may follow a block; never 0."""
    return name[0] << 8 | name[1] or 1
