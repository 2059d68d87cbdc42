"""The product's policy: what is worth least goes first, and what a class of blocks is worth is learned.

Blocks fall into classes by how often they were seen and where they hang (classes.py). Each class is a list
from least to most recently used; the heads of the lists are compared by what their class at their age is
worth (odds.py), and the least goes. So it is LRU within a class, LFU where counts tell more than ages, LRU-K
in that a second use changes the class, and which of them weighs more follows from what comes back. A block
that can be had from elsewhere counts half.

Within a chain the leaf goes first: a head that has descendants sends them ahead. When a conversation goes on
along another branch than before, the old one is left behind, which is a class of its own.

Invariants
- A slot is in exactly one list if and only if it may go.
- A block is never named while a block after it is here.

Threads: no lock inside; the cache's one lock guards every call.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.eviction.class_lists import ClassLists
from cachemgr.eviction.classes import (
    AFTER_ONE,
    BRANCH,
    CLASSES,
    FEW,
    LEFT_BEHIND,
    MOST_SEEN,
    NEXT,
    OF_COUNT,
    ROOT,
    class_after,
)
from cachemgr.eviction.families import Families
from cachemgr.eviction.ghosts import Ghost
from cachemgr.eviction.groups import GROUP, Groups, mark_of
from cachemgr.eviction.memory import Memory
from cachemgr.eviction.odds import AGES

_UNREADABLE = 2 * CLASSES
"""The list of what goes before everything; below: a list per class, then one per class of cheap copies."""
_CHEAP_WORTH = 0.5
_STAYS_WITH = 8
"""So many go from one list before the lists are compared again."""
_LEARN_EVERY = 256
_SHORTEST_EPOCH = 64
_LOW = 0xFFFFFFFF
_LEADS, _LIST = 0x80, 0x1F
OF_LIST = [*range(CLASSES), *range(CLASSES), LEFT_BEHIND]
"""The class of each list."""
_DEEPEST_WALK = 256
_TRIES = 16
_MOVED_AT_ONCE = 32


class AdaptivePolicy:
    """An EvictionPolicy for slots 0 … capacity − 1; about 42 bytes each, ghosts included."""

    def __init__(self, capacity: int) -> None:
        self._lists = ClassLists(capacity, _UNREADABLE + 1)
        self._families = Families(capacity)
        # What every use touches, without a detour.
        self._older, self._newer, self._sentinels = self._lists.older, self._lists.newer, capacity
        self._child, self._parent = self._families.child, self._families.parent
        self._sibling = self._families.after
        self._memory = Memory(capacity)
        self._odds = self._memory.odds
        self._used_column = np.zeros(capacity, np.uint32)
        self._state_column = np.zeros(capacity, np.uint8)
        self._counts_column = np.zeros(capacity, np.uint8)
        self._used = self._used_column.data
        """The number of a slot's last use, its low 32 bits."""
        self._state = self._state_column.data
        """The list of a slot, and _LEADS if its block is the first of a group."""
        self._counts = self._counts_column.data
        self._groups = Groups(capacity)
        self._gone, self._gone_marks, self._places = (
            self._groups.gone, self._groups.gone_marks, self._groups.places,
        )  # fmt: skip
        self._epoch = 0
        self._epoch_length = max(_SHORTEST_EPOCH, capacity // 8)
        self._uses = 0
        self._next_epoch = self._epoch_length
        self._next_learning = _LEARN_EVERY
        self._next_stop = min(self._next_epoch, self._next_learning)
        self._current = _UNREADABLE
        self._stays = 0
        self._least = 0.0
        """What the head of the current list was worth when it was chosen."""
        self._admitted, self._credit = -1, 0
        """The block that entered last, and how many more may follow it unasked."""
        self._cheap_entered = False
        """Until then there are half as many lists to compare."""
        self._declined_after = -1
        """After this slot the rest of a group was declined; -1: a group was as a whole."""
        self._declined_place = 0
        """Of the block that was declined last, in its group."""

    def enter(
        self, slot: int, name: BlockHash, *, depth: int, parent: int | None, cheap: bool = False
    ) -> None:
        """See EvictionPolicy."""
        self._uses = uses = self._uses + 1
        if uses >= self._next_stop:
            self._stop()
        state = self._state
        count, gone, above, place = 1, 0, -1, 0
        if parent is not None:  # Groups.place_of, without a call
            place = self._places[parent] + 1
            if place >= GROUP:
                place = 0
            elif self._gone[parent]:
                if self._gone_marks[parent] in (0, mark_of(name)):
                    gone = self._groups.follow(parent)
                    count = max(2, self._counts[parent])
                else:
                    place = 0
            elif self._counts[parent] > 1 or self._child[parent] != -1:
                place = 0
        if not place:
            count, gone = self._memory.come_back(name)
        self._places[slot] = place
        self._gone[slot] = gone
        self._gone_marks[slot] = 0
        if parent is not None:
            above = state[parent] & _LIST
            before = self._counts[parent]
            if count > 1:
                kind = OF_COUNT[count]
            elif before == 1:
                kind = AFTER_ONE[OF_LIST[above]]
            else:
                kind = NEXT if before <= FEW else BRANCH
            if self._child[parent] == -1:
                self._child[parent] = slot
                self._parent[slot] = parent
            else:
                self._leave_behind(self._child[parent], before - 1)
                self._families.join(slot, parent)
        elif count > 1:
            kind = OF_COUNT[count]
        else:
            kind = BRANCH if depth else ROOT
        self._admitted = slot
        self._counts[slot] = count
        self._used[slot] = uses & _LOW
        which = kind
        if cheap:
            which += CLASSES
            self._cheap_entered = True
        if place:
            state[slot] = which
        else:
            self._odds.begin(kind, self._epoch)
            state[slot] = which | _LEADS
        older, newer = self._older, self._newer
        before = self._sentinels + which
        if parent is not None and above == which and newer[parent] != -1:
            before = parent
        after = older[before]
        older[slot], newer[slot] = after, before
        newer[after] = older[before] = slot

    def enter_many(
        self, slots: npt.NDArray[np.int32], names: Sequence[BlockHash], depths: npt.NDArray[np.uint32]
    ) -> None:
        """See EvictionPolicy. Their order is all that is known of them: they are no family."""
        if len(slots):
            leads = self._groups.enter_many(slots, depths)
            self._odds.begin(ROOT, self._epoch, lives=int(leads.sum()))
            self._state_column[slots] = np.where(leads, ROOT | _LEADS, ROOT)
            self._counts_column[slots] = 1
            self._used_column[slots] = self._uses & _LOW
            self._lists.append_many(slots, ROOT)

    def enter_first(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._counts[slot] = 0
        self._state[slot] = _UNREADABLE
        self._lists.append(slot, _UNREADABLE)

    def pin(self, slot: int) -> None:
        """See EvictionPolicy."""
        older, newer = self._older, self._newer
        after, before = newer[slot], older[slot]
        newer[before], older[after] = after, before
        newer[slot] = older[slot] = -1

    def release(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._uses = uses = self._uses + 1
        if uses >= self._next_stop:
            self._stop()
        counts, state = self._counts, self._state
        count = counts[slot]
        if count < MOST_SEEN:
            count += 1
            counts[slot] = count
        which = kind = OF_COUNT[count]
        before = state[slot]
        if before & _LIST >= CLASSES:
            which += CLASSES
        if before & _LEADS:
            self._odds.end(OF_LIST[before & _LIST], self._epoch_of(slot), returned=True)
            self._odds.begin(kind, self._epoch)
            state[slot] = which | _LEADS
        else:
            state[slot] = which
        self._used[slot] = uses & _LOW
        parent = self._parent[slot]
        if parent != -1 and self._child[parent] != slot:
            self._leave_behind(self._child[parent], self._counts[parent])  # not yet released itself
            self._families.favour(slot, parent)
        older, newer = self._older, self._newer
        sentinel = self._sentinels + which
        after = older[sentinel]
        older[slot], newer[slot] = after, sentinel
        newer[after] = older[sentinel] = slot

    def renew(self, slot: int) -> None:
        """See EvictionPolicy."""
        which = self._state[slot] & _LIST
        if self._state[slot] & _LEADS:
            self._odds.end(OF_LIST[which], self._epoch_of(slot), returned=False)
            self._odds.begin(OF_LIST[which], self._epoch)
        self._used[slot] = self._uses & _LOW
        self._lists.remove(slot)
        self._lists.append(slot, which)

    def release_first(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._lists.append(slot, _UNREADABLE)

    def victim(self) -> int | None:
        """See EvictionPolicy."""
        lists = self._lists
        slot = self._newer[self._sentinels + self._current]
        if self._stays and slot < self._sentinels and self._child[slot] == -1:
            return slot
        for _ in range(_TRIES):
            if not self._stays or lists.least_recent(self._current) is None:
                self._choose()
            head = lists.least_recent(self._current)
            if head is None:
                return None
            leaf = self._leaf(head, self._current)
            if leaf is not None:
                return leaf
            self._stays = 0
        return None

    def admits(self, name: BlockHash, *, depth: int, parent: int | None) -> bool:
        """See EvictionPolicy."""
        if parent is not None and parent == self._admitted and self._credit:
            self._credit -= 1
            return True
        victim = self.victim() if self._odds.learned else None
        if victim is None:
            return True
        kind = self._kind_of_new(name, depth=depth, parent=parent)
        if self._odds.worth[kind][0] >= self._least:
            self._credit = _STAYS_WITH - 1
            return True
        place = self._place_of(name, parent)
        self._declined_after = -1
        if place and parent is not None:
            self._declined_after = parent
            self._gone_marks[parent] = mark_of(name)
        self._decline(name, place, depth=depth)
        return False

    def decline(self, name: BlockHash, *, depth: int) -> None:
        """See EvictionPolicy."""
        self._decline(name, (self._declined_place + 1) % GROUP, depth=depth)

    def evict(self, slot: int, name: BlockHash | None) -> None:
        """See EvictionPolicy."""
        older, newer = self._older, self._newer
        after, before = newer[slot], older[slot]
        newer[before], older[after] = after, before
        newer[slot] = older[slot] = -1
        if self._stays:
            self._stays -= 1
        gone = self._gone[slot]
        if gone:
            self._gone[slot] = 0
        parent = self._parent[slot]
        if parent != -1 and self._child[parent] == slot and self._sibling[slot] == self._child[slot] == -1:
            self._child[parent] = self._parent[slot] = -1
        elif parent != -1 or self._child[slot] != -1:
            self._families.leave(slot)
        state = self._state[slot]
        if state & _LEADS and name is not None:
            ghost = Ghost(self._epoch_of(slot), OF_LIST[state & _LIST], self._counts[slot], gone)
            self._memory.keep(name, ghost)
        elif parent != -1 and name is not None and OF_LIST[state & _LIST] != LEFT_BEHIND:
            self._gone[parent] = gone + 1 if gone + 1 < GROUP else gone
            self._gone_marks[parent] = name[0] << 8 | name[1] or 1

    def forget(self, slot: int) -> None:
        """See EvictionPolicy."""
        if slot in self._lists:
            self._lists.remove(slot)
        state = self._state[slot]
        if state & _LEADS:
            self._odds.end(OF_LIST[state & _LIST], self._epoch_of(slot), returned=False)
        self._families.leave(slot)
        self._gone[slot] = 0

    def oldest(self) -> list[int]:
        """See EvictionPolicy."""
        heads = [(self._lists.least_recent(which), which) for which in range(_UNREADABLE + 1)]
        leaves = [self._leaf(head, which) for head, which in heads if head is not None]
        return list(dict.fromkeys(leaf for leaf in leaves if leaf is not None))

    def seen(self, slot: int) -> int:
        """See EvictionPolicy."""
        return self._counts[slot]

    def uses(self, name: BlockHash) -> int:
        """See EvictionPolicy."""
        return self._memory.count_of(name)

    def gauges(self) -> dict[str, float]:
        """See EvictionPolicy."""
        return self._memory.gauges()

    def __contains__(self, slot: int) -> bool:
        return self._newer[slot] != -1

    def _kind_of_new(self, name: BlockHash, *, depth: int, parent: int | None) -> int:
        """The class that a block would have if it entered now."""
        if not self._place_of(name, parent):
            count = self._memory.count_of(name)
            if count:
                return OF_COUNT[min(count + 1, MOST_SEEN)]
        elif parent is not None and self._gone[parent]:
            return OF_COUNT[max(2, self._counts[parent])]
        if parent is None:
            return BRANCH if depth else ROOT
        return class_after(OF_LIST[self._state[parent] & _LIST], self._counts[parent])

    def _place_of(self, name: BlockHash, parent: int | None) -> int:
        """The place of a new block in its group; 0: it begins one."""
        known = parent is not None and (self._counts[parent] > 1 or self._child[parent] != -1)
        return self._groups.place_of(mark_of(name), parent, known=known)

    def _decline(self, name: BlockHash, place: int, *, depth: int) -> None:
        self._uses += 1
        self._declined_place = place
        if not place:
            self._declined_after = -1
            self._memory.decline(name, BRANCH if depth else ROOT, self._epoch)
        elif self._declined_after == -1:
            self._memory.lengthen(most=GROUP - 1)
        else:
            self._groups.lengthen(self._declined_after)

    def _epoch_of(self, slot: int) -> int:
        """When it was used last."""
        return (self._uses - ((self._uses - self._used[slot]) & _LOW)) // self._epoch_length

    def _stop(self) -> None:
        """Some uses later: begin an epoch, or learn, whichever is due."""
        while self._uses >= self._next_epoch:
            self._next_epoch += self._epoch_length
            self._epoch = self._odds.advance()
        if self._uses >= self._next_learning:
            self._odds.learn()
            self._next_learning = self._uses + _LEARN_EVERY
        self._next_stop = min(self._next_epoch, self._next_learning)

    def _leave_behind(self, branch: int, before: int) -> None:
        """A chain goes on without `branch`; if that was its way all the few times `before`, it is abandoned.

        Its blocks move front first, so that the last goes first. Of a long one only the front does: the rest
        is sent ahead when its turn comes.
        """
        if before > FEW or self._counts[branch] < before:
            return
        lists, state = self._lists, self._state
        for _ in range(_MOVED_AT_ONCE):
            if branch == -1 or branch not in lists:
                return
            kind = OF_LIST[state[branch] & _LIST]
            if kind == LEFT_BEHIND or state[branch] & _LIST == _UNREADABLE:
                return
            if state[branch] & _LEADS:
                epoch = self._epoch_of(branch)
                self._odds.end(kind, epoch, returned=False)
                if self._epoch - epoch < AGES:
                    self._odds.begin(LEFT_BEHIND, epoch)
            which = LEFT_BEHIND + CLASSES if state[branch] & _LIST >= CLASSES else LEFT_BEHIND
            state[branch] = which | (state[branch] & _LEADS)
            lists.remove(branch)
            lists.prepend(branch, which)
            branch = self._families.child[branch]

    def _choose(self) -> None:
        """The list whose head is worth least."""
        sentinels = self._sentinels
        self._stays = _STAYS_WITH
        self._current = _UNREADABLE
        if self._newer[sentinels + _UNREADABLE] < sentinels:
            return
        least = -1.0
        used, uses, length = self._used, self._uses, self._epoch_length
        worth, learned = self._odds.worth, self._odds.learned
        lists = _UNREADABLE if self._cheap_entered else CLASSES
        for which, head in enumerate(self._newer[sentinels : sentinels + lists].tolist()):
            if head >= sentinels:
                continue
            age = (uses - used[head]) & _LOW
            if learned:
                epochs = age // length
                value = worth[OF_LIST[which]][epochs if epochs < AGES else -1]
            else:
                value = 1 / (1 + age)
            if which >= CLASSES:
                value *= _CHEAP_WORTH
            if least < 0 or value < least:
                least, self._current = value, which
        self._least = least

    def _leaf(self, slot: int, which: int) -> int | None:
        """What must go before the head of a list, moved ahead of it; None if that may not go."""
        child = self._families.child[slot]
        steps = 0
        while child != -1 and steps < _DEEPEST_WALK:
            if child not in self._lists:  # in use, and `slot` with it
                self._lists.remove(slot)
                self._lists.append(slot, which)
                return None
            self._lists.remove(child)
            self._lists.prepend(child, which)
            slot, child = child, self._families.child[child]
            steps += 1
        return slot if child == -1 else None
