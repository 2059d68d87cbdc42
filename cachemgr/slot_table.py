"""Who lives in which slot: indexes and eviction order behind the cache's one lock.

A run of blocks may alternate between own slots and those of the node's other processes; own ones win.

The lock is held for at most 100 µs of work: chains are walked in slices of 64 blocks, and no copy, tag,
system call or engine call happens under it. A slot whose bytes must be erased first loses its name, then is
erased without the lock, and is free only after that.

Invariants
- A slot is in the eviction order if and only if it is resident and unpinned.
- A block is not evicted while one that came after it is here, unless they count to different namespaces.
- Only own slots are pinned, ordered, evicted or erased; those of others are hints (see other_blocks.py).
- A block that failed its check loses its name at once, and its slot with the last pin.

Threads: any.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cachemgr.chain_room import FULL, OWN_CHAIN, reserve_in_chain
from cachemgr.contract import BlockHash, NamespaceShare
from cachemgr.counts import Counts
from cachemgr.integrity import check_shares, check_slots
from cachemgr.other_blocks import FIRST_OTHER_SLOT, mixed_run
from cachemgr.shard import BlockAddress, Verdict
from cachemgr.single_blocks import SingleBlocks
from cachemgr.slot_shares import SlotShares
from cachemgr.slot_state import SLICE, Clock, SlotState, slices

_SWEPT_AT_ONCE = 8


class SlotTable:
    """The metadata of `capacity` slots.

    `erase(slot)` unpublishes a slot's bytes; `clock` is monotonic seconds.
    """

    def __init__(
        self, capacity: int, *, ttl_s: float, erase: Callable[[int], None], clock: Clock, counts: Counts
    ) -> None:
        self._state = SlotState(capacity, ttl_s=ttl_s, erase=erase, clock=clock, counts=counts)
        self._ttl_s = ttl_s
        self._erase = erase
        self._clock = clock
        self._counts = counts
        self.declines = True
        """A block that is worth less than what must go for it does not enter. False: it does all the same,
        because whoever is beyond this process gets it from here."""
        self.single = SingleBlocks(self._state)
        """The same slots for whoever asks for blocks by name, in any order."""
        self._shares = SlotShares(self._state)

    def known(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the longest leading run that is resident and not expired."""
        used_after = self._clock() - self._ttl_s
        found = 0
        for part in slices(hashes):
            with self._state.lock:
                run = mixed_run(part, self._state.index, self._state.others, used_after=used_after)
            found += len(run)
            if len(run) < len(part):
                break
        return found

    def pin(self, hashes: Sequence[BlockHash], *, namespace: str = "") -> list[int]:
        """Pin what is ours of that run; its slots. What is evicted between two slices only shortens it.

        `namespace`: whose it is from now on, where it is nobody's.
        """
        slots = self._pin_run(hashes)
        self._shares.claim(namespace, hashes, slots, front=0)
        theirs = sum(slot >= FIRST_OTHER_SLOT for slot in slots)
        with self._state.lock:
            self._counts.acquires += 1
            self._counts.lookup_blocks += len(hashes)
            self._counts.hit_blocks += len(slots)
            self._counts.foreign_hit_blocks += theirs
        return slots

    def pin_fetched(
        self,
        hashes: Sequence[BlockHash],
        *,
        waited_s: float,
        timed_out: bool,
        namespace: str = "",
        front: Sequence[int] = (),
    ) -> list[int]:
        """Pin what came of the rest of a chain whose front is pinned, in `front`; its slots."""
        slots = self._pin_run(hashes)
        self._shares.claim(namespace, hashes, [*front[-1:], *slots], front=len(front[-1:]))
        with self._state.lock:
            self._counts.fetches += 1
            self._counts.fetched_blocks += len(slots)
            self._counts.fetch_seconds += waited_s
            self._counts.fetch_timeouts += timed_out
        return slots

    def unpin(self, slots: Sequence[int]) -> None:
        """Undo a pin of slots in chain order; they are then the most recently used, the front most of all."""
        now = self._clock()
        state = self._state
        for part in slices(slots[::-1]):
            with state.lock:
                if state.closed:
                    return
                for slot in part:
                    if slot < FIRST_OTHER_SLOT:
                        state.unpin(slot, now=now)

    def reserve(self, hashes: Sequence[BlockHash], index: int, *, namespace: str = "") -> int | None:
        """A slot for block `index` of the chain; None if it exists or no block should go for it.

        It counts to `namespace`. The slot may still carry what went for it: the caller erases that before it
        writes. Nothing of ours goes for a block that another process holds, but a free slot takes a copy.
        """
        slot = reserve_in_chain(self._state, hashes, index, namespace=namespace, declines=self.declines)
        if slot == OWN_CHAIN:
            # What should go is an ancestor of the new block: this chain is in use without a lease. Say so,
            # and look again, also at what is worth more; if there are only ancestors, the front of the chain
            # is worth more than its end.
            self._refresh(hashes[:index])
            slot = reserve_in_chain(
                self._state, hashes, index, namespace=namespace, declines=self.declines, refreshed=True
            )
        if slot == FULL:
            with self._state.lock:
                self._counts.full_refusals += 1
        return slot if slot >= 0 else None

    def publish(self, slot: int, address: BlockAddress, hashes: Sequence[BlockHash]) -> None:
        """The bytes of a reserved slot are sealed: let readers find them."""
        now = self._clock()
        age = 0.0
        with self._state.lock:
            if self._state.closed:
                return
            if new := self._state.fulfil(slot, address, now=now, cheap=False):
                self._counts.committed_blocks += 1
                first = self._state.index.find(hashes[0])
                age = now - self._state.index.last_used(first) if first is not None else 0.0
        if not new:
            self._state.erase_reserved(slot, address.hash)
        if self._ttl_s / 4 <= age < self._ttl_s:  # it grows, so it is in use: its front must not expire
            self._refresh(hashes[: address.index])

    def cancel(self, name: BlockHash) -> None:
        """A reserved slot stays unwritten."""
        self._state.cancel(name)

    def reject(self, slot: int, name: BlockHash, verdict: Verdict) -> None:
        """A leased block failed its check: nobody finds it any more.

        Corrupt bytes are erased, unreadable ones kept; those of another process are its own business. The
        caller keeps its lease until this returns: nobody writes the slot meanwhile.
        """
        with self._state.lock:
            if slot >= FIRST_OTHER_SLOT:
                self._state.others.remove(name, slot)
                self._counts.stale_blocks += 1
                return
            if self._state.closed or self._state.index.name(slot) != name or not self._state.index.pins(slot):
                return  # another reader of the same slot was first
            self._state.index.forget(slot)
            self._state.rejected[slot] = verdict
            if verdict is Verdict.CORRUPT:
                self._counts.corrupt_blocks += 1
            else:
                self._counts.unreadable_blocks += 1
        if verdict is Verdict.CORRUPT:
            self._erase(slot)

    def sweep(self) -> None:
        """Free a few expired blocks, ends of chains first. Called once per request."""
        expired_before = self._clock() - self._ttl_s
        expired: list[int] = []
        with self._state.lock:
            policy = self._state.shares.next_swept()
            while len(expired) < _SWEPT_AT_ONCE:
                oldest = policy.oldest()
                found = [slot for slot in oldest if self._state.index.last_used(slot) <= expired_before]
                for slot in found:
                    self._state.order.forget(slot)
                    self._state.index.forget(slot)
                expired += found
                if not found:
                    break
            self._counts.expired_blocks += len(expired)
        self._state.erase_and_free(expired)
        if self._state.shares.named:
            self._shares.trim()

    def add_empty(self, slots: range) -> None:
        """Take in slots that hold nothing."""
        with self._state.lock:
            self._state.index.add_slots(slots)
            self._state.add_slots(len(slots))

    def add_resident(
        self, names: list[BlockHash], slots: npt.NDArray[np.int32], depths: npt.NDArray[np.uint32]
    ) -> None:
        """Take in slots found written, deepest blocks first. A block that is resident elsewhere is erased."""
        now = self._clock()
        for start in range(0, len(names), SLICE):
            part = slice(start, start + SLICE)
            with self._state.lock:
                new = self._state.index.insert_many(names[part], slots[part], depths=depths[part], now=now)
                self._state.order.enter_many(
                    slots[part][new],
                    [name for name, is_new in zip(names[part], new, strict=True) if is_new],
                    depths[part][new],
                )
                self._state.add_slots(len(new))
                self._counts.reattached_blocks += int(new.sum())
            self._state.erase_and_free(slots[part][~new].tolist())

    def add_unreadable(self, slots: Sequence[int]) -> None:
        """Take in shards that only another process can read: never found, first to be evicted."""
        now = self._clock()
        for part in slices(slots):
            with self._state.lock:
                for slot in part:
                    self._state.index.touch(slot, now=now)
                    self._state.order.enter_first(slot)
                self._state.add_slots(len(part))
                self._counts.unreadable_blocks += len(part)

    def add_others(self, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """Another process published these; (name, slot), at most a slice."""
        now = self._clock()
        with self._state.lock:
            if self._state.closed:
                return
            for name, slot in blocks:
                self._state.others.add(name, slot, now=now)

    def forget_others(self, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """Another process unpublished these; (name, slot), at most a slice."""
        with self._state.lock:
            for name, slot in blocks:
                self._state.others.remove(name, slot)

    def set_shares(self, shares: Mapping[str, NamespaceShare]) -> None:
        """See PrefixCache. ValueError for what cannot be kept; nothing has changed then."""
        self._shares.set(shares)

    def set_public(self, names: frozenset[BlockHash]) -> None:
        """Blocks of these names count to no namespace from now on, whoever makes or uses them."""
        self._shares.set_public(names)

    def usage(self) -> Mapping[str, int]:
        """See PrefixCache. Blocks that are being written for a namespace count as well."""
        return self._shares.usage()

    def gauges(self) -> dict[str, float]:
        """Resident blocks and pins, now."""
        return {
            "cache_resident_blocks": float(len(self._state.index)),
            "cache_foreign_blocks": float(len(self._state.others)),
            "cache_pins": float(self._state.index.pinned),
            **self._state.shares.gauges(),
        }

    def close(self) -> None:
        """Forget everything; leases and reservations still held become empty gestures."""
        self._state.close()

    def check_integrity(self, slots: Iterable[int] = ()) -> list[tuple[BlockHash, int]]:
        """AssertionError if the invariants are broken; every resident block and its slot.

        `slots`: all that were taken in. O(n): for tests and idle checks.
        """
        state = self._state
        with state.lock:
            check_shares(state.index, state.shares)
            return check_slots(
                state.index, state.order, rejected=state.rejected, slots=() if state.closed else slots
            )

    def _pin_run(self, hashes: Sequence[BlockHash]) -> list[int]:
        now, used_after = self._state.times()
        state = self._state
        slots: list[int] = []
        for part in slices(hashes):
            with state.lock:
                run = mixed_run(part, state.index, state.others, used_after=used_after)
                for slot in run:
                    state.pin(slot, now=now)
            slots += run
            if len(run) < len(part):
                break
        return slots

    def _refresh(self, hashes: Sequence[BlockHash]) -> None:
        """Make what is resident and evictable of a chain the most recently used."""
        now = self._clock()
        for part in slices(hashes[::-1]):
            with self._state.lock:
                for name in part:
                    slot = self._state.index.find(name)
                    if slot is None or self._state.index.last_used(slot) <= now - self._ttl_s:
                        continue
                    if slot in self._state.order:
                        self._state.order.renew(slot)
                        self._state.index.touch(slot, now=now)
