"""Whether a new block is worth what must go for it; one that is not is remembered all the same.

What keeps coming back late is worth more, when its time comes near, than what was seen just now: a cache that
takes in everything would lose it just before. Whoever is declined and comes again was seen before.
"""

from cachemgr.contract import BlockHash
from cachemgr.eviction.choice import BATCH, Choice
from cachemgr.eviction.classes import BRANCH, MOST_SEEN, OF_COUNT, ROOT, class_after
from cachemgr.eviction.groups import GROUP, mark_of
from cachemgr.eviction.slots import PolicySlots


class Admission:
    """Asked while there is no room. What follows a block that was admitted is, too, for a batch."""

    def __init__(self, slots: PolicySlots, choice: Choice) -> None:
        self._slots = slots
        self._groups = slots.groups
        self._choice = choice
        self.entered = -1
        """The slot of the block that entered last."""
        self._credit = 0
        """So many more may follow it unasked."""
        self._declined_after = -1
        """After this slot the rest of a group was declined; -1: a group was as a whole."""
        self._declined_place = 0
        """Of the block that was declined last, in its group."""

    def admits(self, name: BlockHash, *, depth: int, parent: int | None) -> bool:
        """See EvictionPolicy."""
        if parent is not None and parent == self.entered and self._credit:
            self._credit -= 1
            return True
        odds = self._slots.odds
        victim = self._choice.victim() if odds.learned else None
        if victim is None:
            return True
        place = self._place_of(name, parent)
        kind = self._kind_of_new(name, place, depth=depth, parent=parent)
        if odds.worth[kind][0] > self._choice.least:  # if it is worth as much, perhaps its own front goes
            self._credit = BATCH - 1
            return True
        self._declined_after = -1
        if place and parent is not None:
            self._declined_after = parent
            self._groups.gone_marks[parent] = mark_of(name)
        self._decline(name, place, depth=depth)
        return False

    def decline(self, name: BlockHash, *, depth: int) -> None:
        """See EvictionPolicy."""
        self._decline(name, (self._declined_place + 1) % GROUP, depth=depth)

    def _decline(self, name: BlockHash, place: int, *, depth: int) -> None:
        slots = self._slots
        slots.uses += 1
        if slots.uses >= slots.next_stop:
            slots.stop()
        if self._choice.stays:  # a batch of declined blocks later, lists are compared again: they are older
            self._choice.stays -= 1
        self._declined_place = place
        if not place:
            self._declined_after = -1
            slots.memory.decline(name, BRANCH if depth else ROOT, slots.epoch)
        elif self._declined_after == -1:
            slots.memory.lengthen(most=GROUP - 1)
        else:
            self._groups.lengthen(self._declined_after)

    def _place_of(self, name: BlockHash, parent: int | None) -> int:
        """The place that a block would have in its group; 0: it would begin one."""
        slots = self._slots
        known = parent is not None and (slots.counts[parent] > 1 or slots.families.child[parent] != -1)
        return self._groups.place_of(mark_of(name), parent, known=known)

    def _kind_of_new(self, name: BlockHash, place: int, *, depth: int, parent: int | None) -> int:
        """The class that a block would have if it entered now."""
        slots = self._slots
        if not place:
            count = slots.memory.count_of(name)
            if count:
                return OF_COUNT[min(count + 1, MOST_SEEN)]
        elif parent is not None and self._groups.gone[parent]:
            return OF_COUNT[max(2, slots.counts[parent])]
        if parent is None:
            return BRANCH if depth else ROOT
        return class_after(slots.kind(parent), slots.counts[parent])
