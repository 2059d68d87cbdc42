"""What the policy knows of every slot, and its clock: shared by the parts that decide.

Columns of numbers, 34 bytes a slot with those of lists, families and groups; the ghosts come to 11 more. Time
is counted in uses: of blocks that entered, were used, or were declined.

Several policies may share the columns, each with slots of its own (shares.py): lists, time, odds and ghosts
are each one's own.
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


class SlotColumns:
    """Of slots 0 … capacity − 1, for up to `policies` policies."""

    def __init__(self, capacity: int, *, policies: int = 1) -> None:
        self.capacity = capacity
        self.lists = ClassLists(capacity, UNREADABLE + 1, sets=policies)
        self.families = Families(capacity)
        self.groups = Groups(capacity)
        self.used = np.zeros(capacity, np.uint32)
        self.state = np.zeros(capacity, np.uint8)
        self.counts = np.zeros(capacity, np.uint8)


class PolicySlots:
    """Of those that belong to policy `number`, about `room` (by default: all)."""

    def __init__(self, columns: SlotColumns, *, number: int = 0, room: int | None = None) -> None:
        room = columns.capacity if room is None else room
        self.lists = columns.lists.another(number)
        self.families = columns.families
        self.groups = columns.groups
        self.memory = Memory(room)
        self.odds = self.memory.odds
        self.used_column = columns.used
        self.state_column = columns.state
        self.counts_column = columns.counts
        self.used = self.used_column.data
        """The number of a slot's last use, its low 32 bits."""
        self.state = self.state_column.data
        self.counts = self.counts_column.data
        self.cheap_entered = False
        """Until then there are half as many lists to compare."""
        self.uses = 0
        self.epoch = 0
        self.epoch_length = max(_SHORTEST_EPOCH, room // 8)
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
