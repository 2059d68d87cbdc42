"""What a bulk client has asked for and not yet got: one object per request, fed with the frames of its
answer.

Invariant: a call is answered once; after that, or after `abandon`, frames that still come change nothing.
Threads: the IO thread.
"""

import asyncio
import struct
from collections.abc import Sequence
from typing import Protocol

from cachemgr.cluster.bulk.frames import (
    ABSENT,
    ACK,
    ACKED,
    GET,
    INDEX_NBYTES,
    PLACES,
    PUT,
    RUN,
    MalformedFrame,
    PeerTrouble,
)
from cachemgr.cluster.bulk.incoming import IncomingBlock, Outcome
from cachemgr.cluster.bulk.messages import Ended, Places, decode
from cachemgr.cluster.bulk.outgoing import OutgoingBlocks
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HeldShard, HostStore
from cachemgr.shard import HEADER_NBYTES, BlockAddress

DISCARD_NBYTES = 32 << 20
"""Bytes of one request that are read for nothing before it is cancelled."""


class ClientCall(Protocol):
    """One request."""

    kind: int
    started: bool
    """The first frame of the answer has come."""
    arrived: list[bool]
    answered: asyncio.Future[Ended]

    def on_frame(self, kind: int, body: bytes) -> None:
        """A frame of the answer other than END, BLOCK and SLICE."""
        ...

    def on_end(self, ended: Ended) -> None:
        """The last frame."""
        ...

    def begin_block(self, index: int, header: bytes) -> IncomingBlock:
        """A block begins."""
        ...

    def end_block(self, index: int, block: IncomingBlock) -> Outcome:
        """A block has come."""
        ...

    def abandon(self) -> None:
        """Nobody waits any more."""
        ...


class GetCall:
    """Blocks asked for; they come in order, or their places do."""

    kind = GET

    def __init__(
        self, store: HostStore, blocks: Sequence[BlockAddress], *, answered: asyncio.Future[Ended]
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._next = 0
        self._wanted = True
        self.answered = answered
        self.started = False
        self.arrived = [False] * len(blocks)
        self.nbytes = 0
        self.discarded = 0
        self.places: Places | None = None

    def on_frame(self, kind: int, body: bytes) -> None:
        """As ClientCall."""
        if kind == ABSENT:
            first, count = RUN.unpack(body)
            self._expect(first, count)
            self._next += count
        elif kind == PLACES and self._next == 0 and self.places is None:
            self.places = decode(body, Places)
            self._expect(0, len(self.places.offsets))
            self._next = len(self.places.offsets)
        else:
            raise MalformedFrame("kind", "one that answers GET", kind)

    def on_end(self, ended: Ended) -> None:
        """As ClientCall."""
        if ended.status == "done" and self._next != len(self._blocks):
            raise MalformedFrame("blocks of an answer", str(len(self._blocks)), self._next)
        if not self.answered.done():
            self.answered.set_result(ended)

    def begin_block(self, index: int, header: bytes) -> IncomingBlock:
        """As ClientCall."""
        self._expect(index, 1)
        self._next += 1
        block = IncomingBlock(self._store, self._blocks[index], header, wanted=self._wanted)
        if block.refusal is Outcome.FOREIGN:
            raise PeerTrouble("foreign", f"the header of block {index} is another block's")
        return block

    def end_block(self, index: int, block: IncomingBlock) -> Outcome:
        """As ClientCall."""
        outcome = block.finish()
        self.nbytes += HEADER_NBYTES + block.nbytes
        if outcome is Outcome.PUBLISHED:
            self.arrived[index] = True
        else:
            self.discarded += block.nbytes
            kept_before = outcome is Outcome.NOT_KEPT
            self.arrived[index] = kept_before and is_here(self._store, self._blocks[index].hash)
        return outcome

    def abandon(self) -> None:
        """As ClientCall."""
        self._wanted = False
        self.answered.cancel()

    @property
    def format_id(self) -> bytes:
        """Of the store that asks."""
        return self._store.format_id

    def name(self, index: int) -> BlockHash:
        """The block hash at `index`."""
        return self._blocks[index].hash

    def _expect(self, first: int, count: int) -> None:
        if first != self._next or not 0 < count <= len(self._blocks) - first:
            raise MalformedFrame("index", f"{self._next}, of {len(self._blocks)} blocks", (first, count))


class PutCall:
    """Blocks offered; those that the peer wants are sent, every one is acknowledged or not."""

    kind = PUT

    def __init__(
        self, store: HostStore, names: Sequence[BlockHash], *, answered: asyncio.Future[Ended]
    ) -> None:
        self._store = store
        self._names = names
        self.answered = answered
        self.started = False
        self.arrived = [False] * len(names)
        self.nbytes = 0
        self.transfer: OutgoingBlocks | None = None

    def on_frame(self, kind: int, body: bytes) -> None:
        """As ClientCall."""
        if kind != ACK:
            raise MalformedFrame("kind", "one that answers PUT", kind)
        index, taken = ACKED.unpack(body)
        if index >= len(self._names) or taken > 1:
            raise MalformedFrame("ack", f"0 or 1, of {len(self._names)} blocks", (index, taken))
        self.arrived[index] = bool(taken)

    def wanted(self, request: int, body: bytes) -> OutgoingBlocks:
        """The peer said which blocks it wants: their transfer."""
        if self.transfer is not None or len(body) % INDEX_NBYTES:
            raise MalformedFrame("want", f"once, a multiple of {INDEX_NBYTES} bytes", len(body))
        listed = struct.unpack(f"<{len(body) // INDEX_NBYTES}I", body)
        if any(index >= len(self._names) for index in listed) or len(set(listed)) < len(listed):
            raise MalformedFrame("want", f"distinct indices below {len(self._names)}", listed[:8])
        self.transfer = OutgoingBlocks(
            self._store, [(index, self._names[index]) for index in listed], request=request, sent=self._count
        )
        return self.transfer

    def on_end(self, ended: Ended) -> None:
        """As ClientCall."""
        if not self.answered.done():
            self.answered.set_result(ended)

    def begin_block(self, index: int, header: bytes) -> IncomingBlock:
        """As ClientCall."""
        raise MalformedFrame("block", "an answer to GET", index)

    def end_block(self, index: int, block: IncomingBlock) -> Outcome:
        """As ClientCall."""
        raise AssertionError("a block that has not begun")

    def abandon(self) -> None:
        """As ClientCall."""
        self.answered.cancel()

    def _count(self, shard: HeldShard) -> None:
        self.nbytes += HEADER_NBYTES + len(shard.payload)


def is_here(store: HostStore, name: BlockHash) -> bool:
    """True if `store` has the block, published."""
    (shard,) = store.hold([name])
    if shard is None:
        return False
    store.let_go([shard])
    return True

