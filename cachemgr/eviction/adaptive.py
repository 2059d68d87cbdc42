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
from cachemgr.eviction.admission import Admission
from cachemgr.eviction.choice import Choice
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
)
from cachemgr.eviction.ghosts import Ghost
from cachemgr.eviction.groups import GROUP, mark_of
from cachemgr.eviction.handover import hand_over, move_lives
from cachemgr.eviction.odds import AGES
from cachemgr.eviction.slots import LEADS, LIST, LOW, OF_LIST, UNREADABLE, PolicySlots, SlotColumns

_MOVED_AT_ONCE = 32


class AdaptivePolicy:
    """An EvictionPolicy for slots 0 … capacity − 1; 45 bytes each, ghosts included.

    `slots`: where it keeps what it knows, if others share the columns.
    """

    def __init__(self, capacity: int, slots: PolicySlots | None = None) -> None:
        self._slots = slots = slots or PolicySlots(SlotColumns(capacity))
        self._choice = Choice(slots)
        self._admission = Admission(slots, self._choice)
        self._memory, self._odds, self._groups = slots.memory, slots.odds, slots.groups
        self._lists, self._families = slots.lists, slots.families
        # What every use touches, without a detour.
        self._used, self._state, self._counts = slots.used, slots.state, slots.counts
        self._older, self._newer = slots.lists.older, slots.lists.newer
        self._sentinels = slots.lists.first_sentinel
        self._child, self._parent, self._sibling = (
            slots.families.child, slots.families.parent, slots.families.after,
        )  # fmt: skip
        self._gone, self._gone_marks, self._places = (
            slots.groups.gone, slots.groups.gone_marks, slots.groups.places,
        )  # fmt: skip

    def enter(
        self, slot: int, name: BlockHash, *, depth: int, parent: int | None, cheap: bool = False
    ) -> None:
        """See EvictionPolicy."""
        slots = self._slots
        slots.uses = uses = slots.uses + 1
        if uses >= slots.next_stop:
            slots.stop()
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
        if gone:
            self._gone[slot] = gone
            self._gone_marks[slot] = 0
        if parent is not None:
            above = state[parent] & LIST
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
        self._admission.entered = slot
        self._counts[slot] = count
        self._used[slot] = uses & LOW
        which = kind
        if cheap:
            which += CLASSES
            slots.cheap_entered = True
        if place:
            state[slot] = which
        else:
            self._odds.begin(kind, self._slots.epoch)
            state[slot] = which | LEADS
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
            self._odds.begin(ROOT, self._slots.epoch, lives=int(leads.sum()))
            self._slots.state_column[slots] = np.where(leads, ROOT | LEADS, ROOT)
            self._slots.counts_column[slots] = 1
            self._slots.used_column[slots] = self._slots.uses & LOW
            self._lists.append_many(slots, ROOT)

    def enter_first(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._counts[slot] = 0
        self._state[slot] = UNREADABLE
        self._lists.append(slot, UNREADABLE)

    def pin(self, slot: int) -> None:
        """See EvictionPolicy."""
        older, newer = self._older, self._newer
        after, before = newer[slot], older[slot]
        newer[before], older[after] = after, before
        newer[slot] = older[slot] = -1

    def release(self, slot: int) -> None:
        """See EvictionPolicy."""
        slots = self._slots
        slots.uses = uses = slots.uses + 1
        if uses >= slots.next_stop:
            slots.stop()
        counts, state = self._counts, self._state
        count = counts[slot]
        if count < MOST_SEEN:
            count += 1
            counts[slot] = count
        which = kind = OF_COUNT[count]
        before = state[slot]
        if before & LIST >= CLASSES:
            which += CLASSES
        if before & LEADS:
            self._odds.end(OF_LIST[before & LIST], self._slots.epoch_of(slot), returned=True)
            self._odds.begin(kind, self._slots.epoch)
            state[slot] = which | LEADS
        else:
            state[slot] = which
        self._used[slot] = uses & LOW
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
        which = self._state[slot] & LIST
        if self._state[slot] & LEADS:
            self._odds.end(OF_LIST[which], self._slots.epoch_of(slot), returned=False)
            self._odds.begin(OF_LIST[which], self._slots.epoch)
        self._used[slot] = self._slots.uses & LOW
        self._lists.remove(slot)
        self._lists.append(slot, which)

    def release_first(self, slot: int) -> None:
        """See EvictionPolicy."""
        state = self._state[slot]
        if state & LEADS:
            self._odds.end(OF_LIST[state & LIST], self._slots.epoch_of(slot), returned=False)
        self._state[slot] = UNREADABLE
        self._lists.append(slot, UNREADABLE)

    def admits(self, name: BlockHash, *, depth: int, parent: int | None) -> bool:
        """See EvictionPolicy."""
        return self._admission.admits(name, depth=depth, parent=parent)

    def decline(self, name: BlockHash, *, depth: int) -> None:
        """See EvictionPolicy."""
        self._admission.decline(name, depth=depth)

    def victim(self) -> int | None:
        """See EvictionPolicy."""
        return self._choice.victim()

    def oldest(self) -> list[int]:
        """See EvictionPolicy."""
        return self._choice.oldest()

    def evict(self, slot: int, name: BlockHash | None) -> None:
        """See EvictionPolicy."""
        older, newer = self._older, self._newer
        after, before = newer[slot], older[slot]
        newer[before], older[after] = after, before
        newer[slot] = older[slot] = -1
        if self._choice.stays:
            self._choice.stays -= 1
        gone = self._gone[slot]
        if gone:
            self._gone[slot] = 0
        parent = self._parent[slot]
        if parent != -1 and self._child[parent] == slot and self._sibling[slot] == self._child[slot] == -1:
            self._child[parent] = self._parent[slot] = -1
        elif parent != -1 or self._child[slot] != -1:
            self._families.leave(slot)
        state = self._state[slot]
        if state & LEADS and name is not None:
            ghost = Ghost(self._slots.epoch_of(slot), OF_LIST[state & LIST], self._counts[slot], gone)
            self._memory.keep(name, ghost)
        elif parent != -1 and name is not None and OF_LIST[state & LIST] != LEFT_BEHIND:
            self._gone[parent] = gone + 1 if gone + 1 < GROUP else gone
            self._gone_marks[parent] = name[0] << 8 | name[1] or 1  # mark_of, without a call

    def forget(self, slot: int) -> None:
        """See EvictionPolicy."""
        if slot in self._lists:
            self._lists.remove(slot)
        state = self._state[slot]
        if state & LEADS:
            self._odds.end(OF_LIST[state & LIST], self._slots.epoch_of(slot), returned=False)
        self._families.leave(slot)
        self._gone[slot] = 0

    def adopt(self, slot: int, name: BlockHash, *, source: "AdaptivePolicy", after: int | None) -> None:
        """A pinned slot is this policy's from now on; `source` shares the columns. See handover.py."""
        hand_over(slot, name, source=source._slots, target=self._slots, after=after)

    def take_over(self, source: "AdaptivePolicy") -> None:
        """All that may go in `source` may go here, as the least recent. Then `adopt_many` all of its slots.

        Until then `source` goes on hearing of them.
        """
        self._lists.take_all(source._lists)
        source._sentinels = self._sentinels
        self._slots.cheap_entered = self._slots.cheap_entered or source._slots.cheap_entered

    def adopt_many(self, slots: npt.NDArray[np.intp], *, source: "AdaptivePolicy") -> None:
        """Some slots of a policy that was taken over, pinned or not."""
        move_lives(slots, source=source._slots, target=self._slots)

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
            kind = OF_LIST[state[branch] & LIST]
            if kind == LEFT_BEHIND or state[branch] & LIST == UNREADABLE:
                return
            if state[branch] & LEADS:
                epoch = self._slots.epoch_of(branch)
                self._odds.end(kind, epoch, returned=False)
                if self._slots.epoch - epoch < AGES:
                    self._odds.begin(LEFT_BEHIND, epoch)
            which = LEFT_BEHIND + CLASSES if state[branch] & LIST >= CLASSES else LEFT_BEHIND
            state[branch] = which | (state[branch] & LEADS)
            lists.remove(branch)
            lists.prepend(branch, which)
            branch = self._families.child[branch]
