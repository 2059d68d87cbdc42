"""All that the cache's one lock guards, and the lock: which slot holds what, and which may be evicted.

Shared by slot_table.py (chains of this process) and single_blocks.py (whatever other nodes ask for).

Threads: any; each method says whether the caller holds the lock.
"""

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TypeVar

from cachemgr.contract import BlockHash
from cachemgr.counts import Counts
from cachemgr.eviction import EvictionPolicy, Shares, SlotOrder
from cachemgr.index import BlockIndex
from cachemgr.other_blocks import FIRST_OTHER_SLOT, OtherBlocks
from cachemgr.shard import BlockAddress, Verdict

T = TypeVar("T")
Clock = Callable[[], float]

SLICE = 64
"""So many blocks of a chain are walked under one hold of the lock."""

SCATTERED = 32
"""Names that do not follow each other lie anywhere in memory: twice as dear."""


class SlotState:
    """The metadata of `capacity` slots.

    `erase(slot)` unpublishes a slot's bytes; `clock` is monotonic seconds.
    """

    __slots__ = (
        "_clock", "_ttl_s", "closed", "counts", "erase", "index", "lock", "order", "others", "rejected",
        "shares",
    )  # fmt: skip

    def __init__(
        self, capacity: int, *, ttl_s: float, erase: Callable[[int], None], clock: Clock, counts: Counts
    ) -> None:
        self.lock = Lock()
        self.index = BlockIndex(capacity)
        self.others = OtherBlocks()
        self.shares = Shares(capacity)
        self.order: SlotOrder = self.shares.common
        """`shares` while somebody is named there; else there is one policy, asked without a detour."""
        self.rejected: dict[int, Verdict] = {}
        """Slots whose block failed its check, until their last reader is gone."""
        self.counts = counts
        self.closed = False
        self.erase = erase
        self._ttl_s = ttl_s
        self._clock = clock

    def times(self) -> tuple[float, float]:
        """Now, and the time after which a block must have been used to be known still."""
        now = self._clock()
        return now, now - self._ttl_s

    def erase_and_free(self, slots: Sequence[int]) -> None:
        """Let go of a few slots that nobody else knows: without a name, not in the order. Takes the lock."""
        if not slots:
            return
        for slot in slots:
            self.erase(slot)
        with self.lock:
            for slot in slots if not self.closed else ():
                self.index.free(slot)

    def erase_reserved(self, slot: int, name: BlockHash) -> None:
        """A slot was written for nothing: its block is here already. Takes the lock."""
        self.erase(slot)
        self.cancel(name)

    def cancel(self, name: BlockHash) -> None:
        """A reserved slot stays unwritten. Takes the lock."""
        with self.lock:
            if not self.closed:
                self.shares.let_go(self.index.cancel(name))
                self.counts.aborted_blocks += 1

    def close(self) -> None:
        """Forget everything. Takes the lock."""
        with self.lock:
            self.closed = True
            self.index = BlockIndex(0)
            self.others = OtherBlocks()
            self.shares = Shares(0)
            self.order = self.shares.common
            self.rejected = {}

    # Below: the caller holds the lock.

    def find(self, name: BlockHash, *, used_after: float) -> int | None:
        """The slot of a block, ours or another process's, that was used after that time."""
        slot = self.index.find(name)
        if slot is not None and self.index.last_used(slot) > used_after:
            return slot
        return self.others.find(name, used_after=used_after)

    def exists(self, name: BlockHash) -> bool:
        """True if the block is resident or being written; one that is expired gives way here."""
        if self.index.is_reserved(name):
            return True
        slot = self.index.find(name)
        if slot is None:
            return False
        if self.index.last_used(slot) > self._clock() - self._ttl_s:
            return True
        self.drop(slot)
        self.counts.expired_blocks += 1
        return False

    def held_elsewhere(self, name: BlockHash) -> bool:
        """True if another process of this node holds the block."""
        return self.others.has(name, used_after=self._clock() - self._ttl_s)

    def givers(self, number: int) -> list[EvictionPolicy]:
        """Of these policies the first that can give a slot to a number (shares.py) should."""
        shares = self.shares
        if not shares.named:
            return [shares.common]
        return [shares.policy(giver) for giver in shares.ledger.givers(number)]

    def reserve(self, name: BlockHash, number: int) -> int:
        """A free slot for a block that is going to be written, and counts to a number."""
        slot = self.index.reserve(name)
        if number:
            self.shares.take(slot, number)
        return slot

    def add_slots(self, count: int) -> None:
        """There are so many more, empty or not."""
        self.shares.ledger.add_slots(count)

    def evict(self, slot: int, *, number: int = 0) -> None:
        """Free an evictable slot for a block of a number: it is the next one reserved; its bytes stay."""
        if self.shares.named:
            if self.shares.number_of(slot) != number:
                self.counts.share_evictions += 1
            elif number and self.shares.ledger.at_quota(number):
                self.counts.quota_evictions += 1
        self.order.evict(slot, self.index.name(slot))
        self.index.free(slot)
        self.counts.evicted_blocks += 1

    def drop(self, slot: int) -> None:
        """Free an evictable slot for another reason; its bytes stay."""
        self.order.forget(slot)
        self.index.free(slot)

    def fulfil(self, slot: int, address: BlockAddress, *, now: float, cheap: bool) -> bool:
        """Make a reserved slot resident; False if an arena that came meanwhile brought the block along.

        `cheap`: it came from elsewhere, and can again.
        """
        if self.index.find(address.hash) is not None:
            return False
        self.index.fulfil(address.hash, depth=address.index, now=now)
        parent = self.index.find(address.parent)
        self.order.enter(slot, address.hash, depth=address.index, parent=parent, cheap=cheap)
        return True

    def pin(self, slot: int, *, now: float) -> None:
        """One more reader of a slot that `find` or a run named; another process's is only said to be used."""
        if slot >= FIRST_OTHER_SLOT:
            self.others.touch(slot, now=now)
        elif self.index.pin(slot):
            self.order.pin(slot)

    def unpin(self, slot: int, *, now: float) -> None:
        """One reader of a slot of ours less; after the last it is the most recently used."""
        if not self.index.unpin(slot, now=now):
            return
        verdict = self.rejected.pop(slot, None)
        if verdict is None:
            self.order.release(slot)
        elif verdict is Verdict.CORRUPT:
            self.order.forget(slot)
            self.index.free(slot)
        else:
            self.order.release_first(slot)


def slices(items: Sequence[T], of: int = SLICE) -> Iterator[Sequence[T]]:
    """A few at a time: as many as fit under one hold of the lock."""
    return (items[start : start + of] for start in range(0, len(items), of))
