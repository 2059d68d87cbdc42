"""What the policy knows of every slot, and its clock: shared by the parts that decide.

Columns of numbers, 34 bytes a slot with those of lists, families and groups; the ghosts come to 11 more. Time
is counted in uses: of blocks that entered, were used, or were declined.
"""

from typing import Final

import numpy as np

from cachemgr.eviction.class_lists import ClassLists
from cachemgr.eviction.classes import CLASSES, LEFT_BEHIND
from cachemgr.eviction.families import Families
from cachemgr.eviction.groups import Groups
from cachemgr.eviction.memory import Memory

UNREADABLE: Final = 2 * CLASSES
"""The list of what goes before everything; below: a list per class, then one per class of cheap copies."""
OF_LIST: Final = [*range(CLASSES), *range(CLASSES), LEFT_BEHIND]
"""The class of each list."""
LEADS: Final = 0x80
LIST: Final = 0x1F
"""Of a slot's `state`: is its block the first of a group; which list is it in."""
LOW: Final = 0xFFFFFFFF

_LEARN_EVERY = 256
_SHORTEST_EPOCH = 64


class PolicySlots:
    """Of slots 0 … capacity − 1."""

    def __init__(self, capacity: int) -> None:
        self.lists = ClassLists(capacity, UNREADABLE + 1)
        self.families = Families(capacity)
        self.groups = Groups(capacity)
        self.memory = Memory(capacity)
        self.odds = self.memory.odds
        self.used_column = np.zeros(capacity, np.uint32)
        self.state_column = np.zeros(capacity, np.uint8)
        self.counts_column = np.zeros(capacity, np.uint8)
        self.used = self.used_column.data
        """The number of a slot's last use, its low 32 bits."""
        self.state = self.state_column.data
        self.counts = self.counts_column.data
        self.uses = 0
        self.epoch = 0
        self.epoch_length = max(_SHORTEST_EPOCH, capacity // 8)
        self._next_epoch = self.epoch_length
        self._next_learning = _LEARN_EVERY
        self.next_stop = min(self._next_epoch, self._next_learning)
        """When `uses` gets there, `stop` is due."""

    def stop(self) -> None:
        """Begin an epoch, or learn, whichever is due."""
        while self.uses >= self._next_epoch:
            self._next_epoch += self.epoch_length
            self.epoch = self.odds.advance()
        if self.uses >= self._next_learning:
            self.odds.learn()
            self._next_learning = self.uses + _LEARN_EVERY
        self.next_stop = min(self._next_epoch, self._next_learning)

    def epoch_of(self, slot: int) -> int:
        """When it was used last."""
        return (self.uses - ((self.uses - self.used[slot]) & LOW)) // self.epoch_length

    def kind(self, slot: int) -> int:
        """Its class."""
        kind: int = OF_LIST[self.state[slot] & LIST]
        return kind
