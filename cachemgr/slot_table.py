"""Who lives in which slot: indexes and eviction order behind the cache's one lock.

A run of blocks may alternate between own slots and those of the node's other processes; own ones win.

The lock is held for at most 100 µs of work: chains are walked in slices of 64 blocks, and no copy, tag,
system call or engine call happens under it. A slot whose bytes must be erased first loses its name, then is
erased without the lock, and is free only after that. (The one exception is Python's: a dictionary that
doubles moves its entries, 30 ns each.)

Invariants
- A slot is in the eviction order if and only if it is resident and unpinned.
- Ancestors are at least as recent as their descendants, because runs are always offered deepest first.
- Only own slots are pinned, ordered, evicted or erased; those of others are hints (see other_blocks.py).
- A block that failed its check loses its name at once, and its slot with the last pin.

Threads: any.
"""

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.counts import Counts
from cachemgr.eviction import EvictionPolicy, LeafFirstLru
from cachemgr.index import BlockIndex
from cachemgr.integrity import check_slots
from cachemgr.other_blocks import FIRST_OTHER_SLOT, OtherBlocks, mixed_run
from cachemgr.shard import BlockAddress, Verdict

T = TypeVar("T")
Clock = Callable[[], float]

_SLICE = 64
_SWEPT_AT_ONCE = 8
_FULL, _EXISTS, _OWN_CHAIN = -1, -2, -3


class SlotTable:
    """The metadata of `capacity` slots.

    `erase(slot)` unpublishes a slot's bytes; `clock` is monotonic seconds.
    """

    def __init__(
        self, capacity: int, *, ttl_s: float, erase: Callable[[int], None], clock: Clock, counts: Counts
    ) -> None:
        self._lock = Lock()
        self._index = BlockIndex(capacity)
        self._others = OtherBlocks()
        self._order: EvictionPolicy = LeafFirstLru(capacity)
        self._rejected: dict[int, Verdict] = {}
        self._ttl_s = ttl_s
        self._erase = erase
        self._clock = clock
        self._counts = counts
        self._closed = False

    def known(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the longest leading run that is resident and not expired."""
        used_after = self._clock() - self._ttl_s
        found = 0
        for part in _slices(hashes):
            with self._lock:
                run = mixed_run(part, self._index, self._others, used_after=used_after)
            found += len(run)
            if len(run) < len(part):
                break
        return found

    def pin(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Pin what is ours of that run; its slots. What is evicted between two slices only shortens it."""
        now = self._clock()
        used_after = now - self._ttl_s
        slots: list[int] = []
        for part in _slices(hashes):
            with self._lock:
                run = mixed_run(part, self._index, self._others, used_after=used_after)
                for slot in run:
                    if slot >= FIRST_OTHER_SLOT:
                        self._others.touch(slot, now=now)
                    elif self._index.pin(slot):
                        self._order.withdraw(slot)
            slots += run
            if len(run) < len(part):
                break
        theirs = sum(slot >= FIRST_OTHER_SLOT for slot in slots)
        with self._lock:
            self._counts.acquires += 1
            self._counts.lookup_blocks += len(hashes)
            self._counts.hit_blocks += len(slots)
            self._counts.foreign_hit_blocks += theirs
        return slots

    def unpin(self, slots: Sequence[int]) -> None:
        """Undo `pin`; the run is then the most recently used."""
        now = self._clock()
        for part in _slices(slots[::-1]):
            with self._lock:
                if self._closed:
                    return
                for slot in part:
                    if slot < FIRST_OTHER_SLOT and self._index.unpin(slot, now=now):
                        self._settle(slot)

    def reserve(self, hashes: Sequence[BlockHash], index: int) -> int | None:
        """A slot for block `index` of the chain; None if it exists or no block may go for it.

        The slot may still carry what went for it: the caller erases that before it writes.
        Nothing of ours goes for a block that another process holds, but a free slot takes a copy of it.
        """
        slot = self._try_reserve(hashes, index)
        if slot == _OWN_CHAIN:
            # The least recent block is an ancestor of the new one: this chain is in use without a lease.
            # Say so, and look again; if it is still an ancestor, the front of the chain is worth more than
            # its end.
            self._refresh(hashes[:index])
            slot = self._try_reserve(hashes, index)
        if slot in (_FULL, _OWN_CHAIN):
            with self._lock:
                self._counts.full_refusals += 1
        return slot if slot >= 0 else None

    def publish(self, slot: int, address: BlockAddress, hashes: Sequence[BlockHash]) -> None:
        """The bytes of a reserved slot are sealed: let readers find them."""
        now = self._clock()
        with self._lock:
            if self._closed:
                return
            known = self._index.find(address.hash) is not None
            age = 0.0 if known else self._fulfil(slot, address, front=hashes[0], now=now)
        if known:  # an arena that came meanwhile brought it along
            self._erase(slot)
            self.cancel(address.hash)
        if self._ttl_s / 4 <= age < self._ttl_s:  # it grows, so it is in use: its front must not expire
            self._refresh(hashes[: address.index])

    def cancel(self, name: BlockHash) -> None:
        """A reserved slot stays unwritten."""
        with self._lock:
            if not self._closed:
                self._index.cancel(name)
                self._counts.aborted_blocks += 1

    def reject(self, slot: int, name: BlockHash, verdict: Verdict) -> None:
        """A leased block failed its check: nobody finds it any more.

        Corrupt bytes are erased, unreadable ones kept; those of another process are its own business. The
        caller keeps its lease until this returns: nobody writes the slot meanwhile.
        """
        with self._lock:
            if slot >= FIRST_OTHER_SLOT:
                self._others.remove(name, slot)
                self._counts.stale_blocks += 1
                return
            if self._closed or self._index.name(slot) != name:
                return  # another reader of the same slot was first
            self._index.forget(slot)
            self._rejected[slot] = verdict
            if verdict is Verdict.CORRUPT:
                self._counts.corrupt_blocks += 1
            else:
                self._counts.unreadable_blocks += 1
        if verdict is Verdict.CORRUPT:
            self._erase(slot)

    def sweep(self) -> None:
        """Free a few expired blocks, least recent first. Called once per request."""
        expired_before = self._clock() - self._ttl_s
        expired: list[int] = []
        with self._lock:
            for _ in range(_SWEPT_AT_ONCE):
                slot = self._order.victim()
                if slot is None or self._index.last_used(slot) > expired_before:
                    break
                self._order.withdraw(slot)
                self._index.forget(slot)
                expired.append(slot)
            self._counts.expired_blocks += len(expired)
        self._erase_and_free(expired)

    def add_empty(self, slots: range) -> None:
        """Take in slots that hold nothing."""
        with self._lock:
            self._index.add_slots(slots)

    def add_resident(
        self, names: list[BlockHash], slots: npt.NDArray[np.int32], depths: npt.NDArray[np.uint32]
    ) -> None:
        """Take in slots found written, deepest blocks first. A block that is resident elsewhere is erased."""
        now = self._clock()
        for start in range(0, len(names), _SLICE):
            part = slice(start, start + _SLICE)
            with self._lock:
                new = self._index.insert_many(names[part], slots[part], depths=depths[part], now=now)
                self._order.offer_many(slots[part][new])
                self._counts.reattached_blocks += int(new.sum())
            self._erase_and_free(slots[part][~new].tolist())

    def add_unreadable(self, slots: Sequence[int]) -> None:
        """Take in shards that only another process can read: never found, first to be evicted."""
        now = self._clock()
        for part in _slices(slots):
            with self._lock:
                for slot in part:
                    self._index.touch(slot, now=now)
                    self._order.offer_first(slot)
                self._counts.unreadable_blocks += len(part)

    def add_others(self, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """Another process published these; (name, slot), at most a slice."""
        now = self._clock()
        with self._lock:
            if self._closed:
                return
            for name, slot in blocks:
                self._others.add(name, slot, now=now)

    def forget_others(self, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """Another process unpublished these; (name, slot), at most a slice."""
        with self._lock:
            for name, slot in blocks:
                self._others.remove(name, slot)

    def gauges(self) -> dict[str, float]:
        """Resident blocks and pins, now."""
        return {
            "cache_resident_blocks": float(len(self._index)),
            "cache_foreign_blocks": float(len(self._others)),
            "cache_pins": float(self._index.pinned),
        }

    def close(self) -> None:
        """Forget everything; leases and reservations still held become empty gestures."""
        with self._lock:
            self._closed = True
            self._index = BlockIndex(0)
            self._others = OtherBlocks()
            self._order = LeafFirstLru(0)

    def check_integrity(self) -> list[tuple[BlockHash, int]]:
        """AssertionError if the invariants are broken; every resident block and its slot.

        O(n): for tests and idle checks.
        """
        with self._lock:
            return check_slots(self._index, self._order, rejected=self._rejected)

    def _refresh(self, hashes: Sequence[BlockHash]) -> None:
        """Make what is resident and evictable of a chain the most recently used."""
        now = self._clock()
        for part in _slices(hashes[::-1]):
            with self._lock:
                for name in part:
                    slot = self._index.find(name)
                    if slot is None or self._index.last_used(slot) <= now - self._ttl_s:
                        continue
                    if slot in self._order:
                        self._order.withdraw(slot)
                        self._order.offer(slot)
                        self._index.touch(slot, now=now)

    def _erase_and_free(self, slots: Sequence[int]) -> None:
        """Let go of a few slots that nobody else knows: without a name, not in the order."""
        if not slots:
            return
        for slot in slots:
            self._erase(slot)
        with self._lock:
            for slot in slots if not self._closed else ():
                self._index.free(slot)

    def _try_reserve(self, hashes: Sequence[BlockHash], index: int) -> int:
        with self._lock:
            name = hashes[index]
            if self._exists(name):
                return _EXISTS
            if not self._index.has_free():
                if self._held_elsewhere(name):
                    return _EXISTS
                if refusal := self._evict_for(hashes, index):
                    return refusal
            return self._index.reserve(name)

    # Below: the lock is held.

    def _exists(self, name: BlockHash) -> bool:
        """True if the block is resident or being written; one that is expired gives way here."""
        if self._index.is_reserved(name):
            return True
        slot = self._index.find(name)
        if slot is None:
            return False
        if self._index.last_used(slot) > self._clock() - self._ttl_s:
            return True
        self._drop(slot)
        self._counts.expired_blocks += 1
        return False

    def _evict_for(self, hashes: Sequence[BlockHash], index: int) -> int:
        """Free one slot for block `index`: 0, or why not."""
        victim = self._order.victim()
        if victim is None:
            return _FULL
        parent = hashes[index - 1] if index else None
        if parent is not None and not self._present(parent):
            return _FULL  # a block whose parent is missing cannot be found: nothing goes for its sake
        depth, name = self._index.depth(victim), self._index.name(victim)
        if name is not None and depth < index and hashes[depth] == name:
            return _OWN_CHAIN
        self._drop(victim)
        self._counts.evicted_blocks += 1
        return 0

    def _present(self, name: BlockHash) -> bool:
        known = self._index.find(name) is not None or self._index.is_reserved(name)
        return known or self._held_elsewhere(name)

    def _held_elsewhere(self, name: BlockHash) -> bool:
        return self._others.has(name, used_after=self._clock() - self._ttl_s)

    def _drop(self, slot: int) -> None:
        """Free an evictable slot, which is then the next one reserved."""
        self._order.withdraw(slot)
        self._index.free(slot)

    def _fulfil(self, slot: int, address: BlockAddress, *, front: BlockHash, now: float) -> float:
        """Make a reserved slot resident; seconds since `front`, the first block of its chain, was used."""
        self._index.fulfil(address.hash, depth=address.index, now=now)
        self._order.offer(slot, parent=self._index.find(address.parent))
        self._counts.committed_blocks += 1
        first = self._index.find(front)
        return now - self._index.last_used(first) if first is not None else 0.0

    def _settle(self, slot: int) -> None:
        """The last pin of a slot is gone."""
        verdict = self._rejected.pop(slot, None)
        if verdict is None:
            self._order.offer(slot)
        elif verdict is Verdict.CORRUPT:
            self._index.free(slot)
        else:
            self._order.offer_first(slot)


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + _SLICE] for start in range(0, len(items), _SLICE))
