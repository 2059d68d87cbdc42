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
from cachemgr.eviction.classes import BRANCH, CLASSES, LEFT_BEHIND, MOST_SEEN, OF_COUNT, ROOT, class_of_new
from cachemgr.eviction.families import Families
from cachemgr.eviction.ghosts import Ghost, Ghosts
from cachemgr.eviction.odds import AGES, Odds

_GROUP = 16
"""So many blocks of a chain are remembered and counted as one: a segment, beginning after the first block."""
_UNREADABLE = 2 * CLASSES
"""The list of what goes before everything; below: a list per class, then one per class of cheap copies."""
_CHEAP_WORTH = 0.5
_STAYS_WITH = 16
"""So many go from one list before the lists are compared again."""
_LEARN_EVERY = 512
_SHORTEST_EPOCH = 64
_LOW = 0xFFFFFFFF
_DEEPEST_WALK = 256
_MOVED_AT_ONCE = 32


class AdaptivePolicy:
    """An EvictionPolicy for slots 0 … capacity − 1; about 46 bytes each, ghosts included."""

    def __init__(self, capacity: int) -> None:
        self._lists = ClassLists(capacity, _UNREADABLE + 1)
        self._families = Families(capacity)
        self._ghosts = Ghosts(capacity)
        self._odds = Odds()
        self._used_column = np.zeros(capacity, np.uint32)
        self._kinds_column = np.zeros(capacity, np.uint8)
        self._counts_column = np.zeros(capacity, np.uint8)
        self._marks_column = np.zeros(capacity, np.uint32)
        self._used = self._used_column.data
        """The number of a slot's last use, its low 32 bits."""
        self._kinds = self._kinds_column.data
        self._counts = self._counts_column.data
        self._marks = self._marks_column.data
        """Fingerprint of the first block of a group; 0 for all others."""
        self._gone_after = np.zeros(capacity, np.uint8).data
        """So many blocks of its group after this one were here and are gone."""
        self._cheap = np.zeros(capacity, np.bool_).data
        self._epoch = 0
        self._epoch_length = max(_SHORTEST_EPOCH, capacity // 8)
        self._uses = 0
        self._next_epoch = self._epoch_length
        self._next_learning = _LEARN_EVERY
        self._next_stop = min(self._next_epoch, self._next_learning)
        self._current = _UNREADABLE
        self._stays = 0
        self._admitted, self._credit = -1, 0
        """The block that entered last, and how many more may follow it unasked."""

    def enter(
        self, slot: int, name: BlockHash, *, depth: int, parent: int | None, cheap: bool = False
    ) -> None:
        """See EvictionPolicy."""
        self._uses += 1
        if self._uses >= self._next_stop:
            self._stop()
        mark = 0
        count = 1
        if _leads(depth):
            mark = _mark(name)
            ghost = self._ghosts.take(mark)
            if ghost is not None:
                count = min(ghost.count + 1, MOST_SEEN)
                self._gone_after[slot] = ghost.followers
                self._odds.end(ghost.kind, ghost.epoch, returned=True)
        elif parent is not None and self._gone_after[parent]:
            self._gone_after[slot] = self._gone_after[parent] - 1
            count = max(2, self._counts[parent])
        kind = self._kind_of_new(count, depth=depth, parent=parent)
        if parent is not None:
            elder = self._families.child[parent]
            if elder != -1:
                self._leave_behind(elder, parent)
            self._families.join(slot, parent)
        self._admitted = slot
        self._kinds[slot] = kind
        self._counts[slot] = count
        self._used[slot] = self._uses & _LOW
        self._marks[slot] = mark
        if mark:
            self._odds.begin(kind, self._epoch)
        which = kind
        if cheap:
            self._cheap[slot] = True
            which += CLASSES
        older = self._lists.older
        newer = self._lists.newer
        if parent is None or newer[parent] == -1 or self._list_of(parent) != which:
            before = self._lists.first_sentinel + which
        else:
            before = parent
        after = older[before]
        older[slot], newer[slot] = after, before
        newer[after] = older[before] = slot

    def enter_many(
        self, slots: npt.NDArray[np.int32], names: Sequence[BlockHash], depths: npt.NDArray[np.uint32]
    ) -> None:
        """See EvictionPolicy. Their order is all that is known of them: they are no family."""
        if len(slots):
            self._kinds_column[slots] = ROOT
            self._counts_column[slots] = 1
            self._used_column[slots] = self._uses & _LOW
            self._marks_column[slots] = 0
            self._lists.append_many(slots, ROOT)

    def enter_first(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._counts[slot] = self._kinds[slot] = self._marks[slot] = 0
        self._lists.append(slot, _UNREADABLE)

    def pin(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._lists.remove(slot)

    def release(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._uses += 1
        if self._uses >= self._next_stop:
            self._stop()
        count = self._counts[slot]
        if count < MOST_SEEN:
            count += 1
            self._counts[slot] = count
        kind = OF_COUNT[count]
        if self._marks[slot]:
            self._odds.end(self._kinds[slot], self._epoch_of(slot), returned=True)
            self._odds.begin(kind, self._epoch)
        self._kinds[slot] = kind
        self._used[slot] = self._uses & _LOW
        parent = self._families.parent[slot]
        if parent != -1 and self._families.child[parent] != slot:
            self._leave_behind(self._families.child[parent], parent)
            self._families.favour(slot, parent)
        lists = self._lists
        sentinel = lists.first_sentinel + (kind + CLASSES if self._cheap[slot] else kind)
        after = lists.older[sentinel]
        lists.older[slot], lists.newer[slot] = after, sentinel
        lists.newer[after] = lists.older[sentinel] = slot

    def renew(self, slot: int) -> None:
        """See EvictionPolicy."""
        if self._marks[slot]:
            self._odds.end(self._kinds[slot], self._epoch_of(slot), returned=False)
            self._odds.begin(self._kinds[slot], self._epoch)
        self._used[slot] = self._uses & _LOW
        self._lists.remove(slot)
        self._lists.append(slot, self._list_of(slot))

    def release_first(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._lists.append(slot, _UNREADABLE)

    def victim(self) -> int | None:
        """See EvictionPolicy."""
        if not self._stays or self._lists.least_recent(self._current) is None:
            self._choose()
        for _ in range(_GROUP):
            slot = self._lists.least_recent(self._current)
            if slot is None:
                return None
            leaf = self._leaf(slot, self._current)
            if leaf is not None:
                return leaf
            self._choose()
        return None

    def admits(self, name: BlockHash, *, depth: int, parent: int | None) -> bool:
        """See EvictionPolicy."""
        if parent is not None and parent == self._admitted and self._credit:
            self._credit -= 1
            return True
        self._stays = 0
        victim = self.victim() if self._odds.learned else None
        if victim is None:
            return True
        ghost = self._ghosts.find(_mark(name)) if _leads(depth) else None
        kind = self._kind_of_new(ghost.count + 1 if ghost else 1, depth=depth, parent=parent)
        if self._odds.worth[kind][0] >= self._worth_now(victim, self._current):
            self._credit = _STAYS_WITH
            return True
        self.decline(name, depth=depth)
        if parent is not None and not _leads(depth):
            self._gone_after[parent] = max(self._gone_after[parent], (1 - depth) % _GROUP)
        return False

    def decline(self, name: BlockHash, *, depth: int) -> None:
        """See EvictionPolicy."""
        if not _leads(depth):
            return
        mark = _mark(name)
        ghost = self._ghosts.take(mark)
        count = 1
        if ghost is not None:
            self._odds.end(ghost.kind, ghost.epoch, returned=True)
            count = min(ghost.count + 1, MOST_SEEN)
        kind = OF_COUNT[count] if count > 1 else BRANCH if depth else ROOT
        self._odds.begin(kind, self._epoch)
        self._remember(mark, Ghost(self._epoch, kind, count, _GROUP - 1 if depth else 0))
        self._uses += _GROUP

    def evict(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._lists.remove(slot)
        self._stays -= self._stays > 0
        mark, kind, count = self._marks[slot], self._kinds[slot], self._counts[slot]
        epoch = self._epoch_of(slot) if mark else 0
        gone = self._gone_after[slot]
        parent = self._families.leave(slot)
        self._gone_after[slot] = 0
        self._cheap[slot] = False
        if mark:
            self._remember(mark, Ghost(epoch, kind, count, gone))
        elif parent != -1:
            self._gone_after[parent] = max(self._gone_after[parent], gone + 1)

    def forget(self, slot: int) -> None:
        """See EvictionPolicy."""
        if slot in self._lists:
            self._lists.remove(slot)
        if self._marks[slot]:
            self._odds.end(self._kinds[slot], self._epoch_of(slot), returned=False)
        self._families.leave(slot)
        self._gone_after[slot] = self._marks[slot] = 0
        self._cheap[slot] = False

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
        ghost = self._ghosts.find(_mark(name))
        return 0 if ghost is None else ghost.count

    def gauges(self) -> dict[str, float]:
        """See EvictionPolicy."""
        return {"cache_ghosts": float(self._ghosts.held), "cache_ghost_hits_total": float(self._ghosts.hits)}

    def __contains__(self, slot: int) -> bool:
        return slot in self._lists

    def _remember(self, mark: int, ghost: Ghost) -> None:
        lost = self._ghosts.put(mark, ghost)
        if lost is not None:
            self._odds.end(lost.kind, lost.epoch, returned=False)

    def _kind_of_new(self, count: int, *, depth: int, parent: int | None) -> int:
        if count > 1:
            return OF_COUNT[min(count, MOST_SEEN)]
        if parent is None:
            return class_of_new(depth=depth, parent_class=0, parent_count=0)
        if self._gone_after[parent] and not _leads(depth):
            return OF_COUNT[max(2, self._counts[parent])]
        return class_of_new(depth=depth, parent_class=self._kinds[parent], parent_count=self._counts[parent])

    def _worth_now(self, slot: int, which: int) -> float:
        age = (self._uses - self._used[slot]) & _LOW
        if self._odds.learned:
            worth = self._odds.worth[which % CLASSES][min(age // self._epoch_length, AGES - 1)]
        else:
            worth = 1 / (1 + age)
        return worth * _CHEAP_WORTH if which >= CLASSES else worth

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

    def _leave_behind(self, branch: int, parent: int) -> None:
        """`parent` goes on without `branch`; if it mostly went on by that until now, that is abandoned.

        Its blocks move front first, so that the last goes first. Of a long one only the front does: the rest
        is sent ahead when its turn comes.
        """
        if 2 * self._counts[branch] < self._counts[parent]:
            return
        lists, kinds = self._lists, self._kinds
        for _ in range(_MOVED_AT_ONCE):
            if branch == -1 or branch not in lists or kinds[branch] == LEFT_BEHIND:
                return
            epoch = self._epoch_of(branch)
            if self._marks[branch]:
                self._odds.end(kinds[branch], epoch, returned=False)
                if self._epoch - epoch < AGES:
                    self._odds.begin(LEFT_BEHIND, epoch)
            kinds[branch] = LEFT_BEHIND
            lists.remove(branch)
            lists.prepend(branch, self._list_of(branch))
            branch = self._families.child[branch]

    def _list_of(self, slot: int) -> int:
        return self._kinds[slot] + CLASSES if self._cheap[slot] else self._kinds[slot]

    def _choose(self) -> None:
        """The list whose head is worth least."""
        lists = self._lists
        least, self._current = -1.0, _UNREADABLE
        self._stays = _STAYS_WITH
        if lists.least_recent(_UNREADABLE) is not None:
            return
        for which in range(_UNREADABLE):
            head = lists.least_recent(which)
            if head is None:
                continue
            value = self._worth_now(head, which)
            if least < 0 or value < least:
                least, self._current = value, which

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


def _leads(depth: int) -> bool:
    """True for the first block of a group."""
    return depth % _GROUP == 1 or not depth


def _mark(name: BlockHash) -> int:
    """A fingerprint; never 0."""
    return int.from_bytes(name[:4], "little") or 1
