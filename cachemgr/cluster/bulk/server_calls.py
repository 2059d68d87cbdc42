"""What a bulk server is doing for one connection: one object per request, until its END is sent or it is
cancelled.

    GetWork      the blocks, one after the other, from the arena
    PlacesWork   nothing but a lease: the other side reads the arena itself
    PutWork      blocks that come

Invariant: `stop` gives back all that the work holds: pins, budget, lease. Idempotent.
Threads: the IO thread.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachemgr.cluster.bulk.client_calls import is_here
from cachemgr.cluster.bulk.frames import (
    ABSENT,
    ACK,
    ACKED,
    INDEX_NBYTES,
    RUN,
    WANT,
    MalformedFrame,
    pack_frame,
)
from cachemgr.cluster.bulk.incoming import IncomingBlock, Outcome
from cachemgr.cluster.bulk.messages import PlacedFile, Places
from cachemgr.cluster.bulk.outbox import Outbox
from cachemgr.cluster.bulk.outgoing import OutgoingBlocks
from cachemgr.cluster.bulk.send_budget import SendBudget, Waiter
from cachemgr.cluster.bulk.transfer_leases import TransferLease
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HeldShard, HostStore
from cachemgr.shard import HEADER_NBYTES, NO_PARENT, BlockAddress, address_in

OnRead = Callable[[BlockHash, int, int], None]
"""Segment, blocks, bytes."""


class ReadCounts:
    """What one request read, by segment; told once."""

    def __init__(self, on_read: OnRead) -> None:
        self._on_read = on_read
        self.segments: dict[BlockHash, list[int]] = {}

    def add(self, shard: HeldShard) -> None:
        """One block of a segment was read."""
        counts = self.segments.setdefault(shard.address.segment, [0, 0])
        counts[0] += 1
        counts[1] += HEADER_NBYTES + len(shard.payload)

    def tell(self) -> None:
        """Tell who counts. Nothing the second time."""
        segments, self.segments = self.segments, {}
        for segment, (blocks, nbytes) in segments.items():
            self._on_read(segment, blocks, nbytes)


class Work(Protocol):
    """One request under way."""

    def stop(self) -> None:
        """It is over, done or not."""
        ...


@dataclass(slots=True)
class Pinned:
    """A share of the server's budget, waited for or had."""

    budget: SendBudget
    nbytes: int
    waiter: Waiter | None = None
    had: bool = False

    def stop(self) -> None:
        """Give it back, or wait no more. Idempotent."""
        if self.waiter is not None:
            self.waiter.forget()
            self.waiter = None
        if self.had:
            self.had = False
            self.budget.give_back(self.nbytes)


class GetWork:
    """Blocks being sent."""

    def __init__(self, pinned: Pinned, *, outbox: Outbox) -> None:
        self._pinned = pinned
        self._outbox = outbox
        self._transfer: OutgoingBlocks | None = None
        self.lease: TransferLease | None = None

    def send(self, transfer: OutgoingBlocks) -> None:
        """The share is there: begin."""
        self._transfer = transfer
        self._outbox.add(transfer)

    def stop(self) -> None:
        """As Work. A frame that has begun is still sent whole."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._outbox.remove(transfer)  # calls `closed` when its last frame is out
        else:
            self.closed()

    def closed(self) -> None:
        """The transfer pins nothing any more."""
        self._pinned.stop()
        if self.lease is not None:
            self.lease.end()


class PlacesWork:
    """Blocks that the other side reads where they lie."""

    def __init__(
        self, store: HostStore, shards: Sequence[HeldShard | None], *, pinned: Pinned, lease: TransferLease
    ) -> None:
        self._store = store
        self._shards = shards
        self._read = 0
        self._pinned = pinned
        self._lease = lease

    def places(self) -> Places:
        """Where they lie."""
        files: dict[PlacedFile, int] = {}
        file_of, offsets = [], []
        for shard in self._shards:
            if shard is None:
                file_of.append(-1)
                offsets.append(0)
                continue
            place = shard.place
            file = PlacedFile(place.path, place.device, place.inode)
            file_of.append(files.setdefault(file, len(files)))
            offsets.append(place.offset)
        return Places(tuple(files), tuple(file_of), tuple(offsets))

    def read(self, count: int) -> bool:
        """The first `count` blocks are copied; True if that was all of them."""
        self._let_go(count)
        self._lease.renew()
        return self._read == len(self._shards)

    def stop(self) -> None:
        """As Work."""
        self._let_go(len(self._shards))
        self._lease.end()
        self._pinned.stop()

    def _let_go(self, count: int) -> None:
        done = [shard for shard in self._shards[self._read : count] if shard is not None]
        self._read = max(self._read, min(count, len(self._shards)))
        if done:
            self._store.let_go(done)


class PutWork:
    """Blocks that come, in the order in which they were wanted."""

    def __init__(self, store: HostStore, names: Sequence[BlockHash], *, request: int) -> None:
        self._store = store
        self._names = names
        self._request = request
        self.lease: TransferLease | None = None
        self._wanted = store.missing(names)
        self._next = 0

    @property
    def done(self) -> bool:
        """Every block is acknowledged, refused or absent."""
        return self._next == len(self._wanted)

    def first_answer(self) -> bytes:
        """WANT, and an ACK for each that is not wanted."""
        wanted = set(self._wanted)
        others = [index for index in range(len(self._names)) if index not in wanted]
        held = self._store.hold([self._names[index] for index in others])
        self._store.let_go([shard for shard in held if shard is not None])
        acks = [self._ack(index, shard is not None) for index, shard in zip(others, held, strict=True)]
        body = struct.pack(f"<{len(self._wanted)}I", *self._wanted)
        assert len(body) == INDEX_NBYTES * len(self._wanted)
        return b"".join([pack_frame(WANT, self._request, body), *acks])

    def begin(self, index: int, header: bytes) -> IncomingBlock:
        """A block comes."""
        self._expect(index, 1)
        name = self._names[index]
        address = address_in(header)
        if address is None or address.hash != name:
            address = BlockAddress(name, NO_PARENT, NO_PARENT, 0)  # which the header does not fit
        return IncomingBlock(self._store, address, header)

    def end(self, index: int, block: IncomingBlock) -> bytes:
        """It has come: its ACK."""
        self._next += 1
        outcome = block.finish()
        taken = outcome in (Outcome.PUBLISHED, Outcome.NOT_KEPT) and is_here(self._store, self._names[index])
        return self._ack(index, taken)

    def absent(self, body: bytes) -> bytes:
        """Blocks that the other side has no more: their ACKs."""
        first, count = RUN.unpack(body)
        if not 0 < count <= len(self._wanted) - self._next:
            raise MalformedFrame(f"count in frame {ABSENT}", "that of blocks wanted", count)
        self._expect(first, count)
        gone = self._wanted[self._next : self._next + count]
        self._next += count
        return b"".join(self._ack(index, False) for index in gone)

    def stop(self) -> None:
        """As Work. The block under way is dropped by the channel."""
        if self.lease is not None:
            self.lease.end()

    def _expect(self, index: int, count: int) -> None:
        if self._next + count > len(self._wanted) or self._wanted[self._next] != index:
            raise MalformedFrame("index", f"that of block {self._next} of {len(self._wanted)} wanted", index)

    def _ack(self, index: int, taken: bool) -> bytes:
        return pack_frame(ACK, self._request, ACKED.pack(index, taken))
