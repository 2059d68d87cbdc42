"""Which slot goes next: of the list whose least recent block is worth least, and there a leaf first.

The lists are compared once per batch: a batch of blocks goes from one list before they are compared again.
"""

from cachemgr.eviction.classes import CLASSES
from cachemgr.eviction.odds import AGES
from cachemgr.eviction.slots import LOW, OF_LIST, UNREADABLE, PolicySlots

BATCH = 8

_CHEAP_WORTH = 0.5
_DEEPEST_WALK = 256
_TRIES = 16


class Choice:
    """Looks at `slots`, and orders what it finds there leaf first."""

    def __init__(self, slots: PolicySlots) -> None:
        self._slots = slots
        self._lists = slots.lists
        self._newer, self._sentinels = slots.lists.newer, slots.lists.first_sentinel
        self._child = slots.families.child
        self._current = UNREADABLE
        self.stays = 0
        """So many more go from the current list before lists are compared."""
        self.least = 0.0
        """What the head of the current list was worth when it was chosen."""

    def victim(self) -> int | None:
        """The slot that should go next; None if none may go."""
        slot = self._newer[self._sentinels + self._current]
        if self.stays and slot < self._sentinels and self._child[slot] == -1:
            return slot
        for _ in range(_TRIES):
            if not self.stays or self._lists.least_recent(self._current) is None:
                self._compare()
            head = self._lists.least_recent(self._current)
            if head is None:
                return None
            leaf = self._leaf(head, self._current)
            if leaf is not None:
                return leaf
            self.stays = 0
        return None

    def oldest(self) -> list[int]:
        """A leaf of the head of each list; whatever was not used for longest is among them."""
        heads = [(self._lists.least_recent(which), which) for which in range(UNREADABLE + 1)]
        leaves = [self._leaf(head, which) for head, which in heads if head is not None]
        return list(dict.fromkeys(leaf for leaf in leaves if leaf is not None))

    def _compare(self) -> None:
        """Find the list whose head is worth least."""
        slots, sentinels = self._slots, self._sentinels
        self.stays = BATCH
        self._current = UNREADABLE
        if self._newer[sentinels + UNREADABLE] < sentinels:
            return
        least = -1.0
        used, uses, length = slots.used, slots.uses, slots.epoch_length
        worth, learned = slots.odds.worth, slots.odds.learned
        lists = UNREADABLE if slots.cheap_entered else CLASSES
        for which, head in enumerate(self._newer[sentinels : sentinels + lists].tolist()):
            if head >= sentinels:
                continue
            age = (uses - used[head]) & LOW
            if learned:
                epochs = age // length
                value = worth[OF_LIST[which]][epochs if epochs < AGES else -1]
            else:
                value = 1 / (1 + age)
            if which >= CLASSES:
                value *= _CHEAP_WORTH
            if least < 0 or value < least:
                least, self._current = value, which
        self.least = least

    def _leaf(self, slot: int, which: int) -> int | None:
        """What must go before the head of a list, moved ahead of it; None if that may not go."""
        lists = self._lists
        child = self._child[slot]
        steps = 0
        while child != -1 and steps < _DEEPEST_WALK:
            if child not in lists:  # in use, and `slot` with it
                lists.remove(slot)
                lists.append(slot, which)
                return None
            lists.remove(child)
            lists.prepend(child, which)
            slot, child = child, self._child[child]
            steps += 1
        return slot if child == -1 else None
