"""The server's end of one bulk connection: what its requests mean, and what they may cost.

    GET   → PLACES, END                      if the other side may share our host
          → BLOCK, SLICE … ABSENT, END       from the arena, as the socket takes it
    PUT   → WANT, ACK for those here already; then an ACK for each that comes, END
    END says busy instead when the connection has too many requests, or the server too many bytes, under way.

Invariants
- Who asks without reading answers is cut off before they fill the memory.
- A request ends with one END, also when it was cancelled; its number is free again after that.
- A transfer without progress for the lease's TTL ends, and with it the connection: half a frame cannot be
  taken back. Blocks read in place are let go instead; who still reads them finds other bytes, and his check
  says so.
Threads: the IO thread.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cachemgr.cluster.bulk.channel import Channel
from cachemgr.cluster.bulk.frames import (
    ABSENT,
    CANCEL,
    CORRUPT,
    COUNT,
    END,
    FROM_CLIENT,
    GET,
    GOAWAY,
    LEASE,
    PLACES,
    PUT,
    RING,
    MalformedFrame,
    pack_frame,
)
from cachemgr.cluster.bulk.incoming import IncomingBlock
from cachemgr.cluster.bulk.messages import NAME_NBYTES, Ended, Request, decode, encode
from cachemgr.cluster.bulk.outgoing import OutgoingBlocks
from cachemgr.cluster.bulk.send_budget import SendBudget
from cachemgr.cluster.bulk.server_calls import GetWork, OnRead, Pinned, PlacesWork, PutWork, ReadCounts, Work
from cachemgr.cluster.bulk.streams import Stream
from cachemgr.cluster.bulk.transfer_leases import TransferLeases
from cachemgr.cluster.contract import Rings
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, RingError, Version, decode_ring, encode_ring
from cachemgr.shard import ShardCheck, Verdict

log = logging.getLogger(__name__)

REQUESTS = 64
"""Under way per connection; more are answered busy."""
UNREAD_NBYTES = 32 << 20
"""Answers that may wait for who asks on and reads nothing: twice what so many requests can have."""
_HOT_WIRE = 2
_MAX_HOT = 255


@dataclass(frozen=True, slots=True)
class Serving:
    """What all connections of a server share."""

    stores: Callable[[bytes], HostStore | None]
    rings: Rings
    settings: ClusterSettings
    budget: SendBudget
    leases: TransferLeases
    on_read: OnRead
    hot_of: Callable[[BlockHash], int]


class ServerConnection:
    """A FrameHandler."""

    def __init__(self, stream: Stream, *, node: NodeId, wire: int, serving: Serving) -> None:
        self._loop = asyncio.get_running_loop()
        self._node = node
        self._wire = wire
        self._serving = serving
        self._channel = Channel(stream, accepts=FROM_CLIENT, handler=self, clock=self._loop.time)
        self._outbox = self._channel.outbox
        self._work: dict[int, Work] = {}
        self._sent_at = self._loop.time()
        """When the other side last took bytes."""
        self._shown: Version | None = None
        """Of the ring that we have sent."""

    async def run(self) -> None:
        """Serve until the other side closes; OSError or MalformedFrame if it ends otherwise."""
        try:
            await self._channel.run()
        finally:
            self.close()

    def go_away(self) -> None:
        """Ask for no new requests; those that come are served."""
        self._outbox.post(pack_frame(GOAWAY, 0))

    def close(self) -> None:
        """End it at once. Idempotent."""
        self._channel.close()
        while self._work:
            self._work.popitem()[1].stop()

    def on_frame(self, kind: int, request: int, body: bytes) -> None:
        """As FrameHandler."""
        if kind in (GET, PUT):
            self._on_request(kind, request, decode(body, Request))
        elif kind == LEASE:
            work = self._work.get(request)
            if isinstance(work, PlacesWork) and work.read(*COUNT.unpack(body)):
                self._stop(request)
        elif kind == CANCEL:
            self._on_cancel(request)
        elif kind == ABSENT:
            work = self._put(request)
            if work is not None:
                self._answer_put(request, work, work.absent(body))
        elif kind == CORRUPT:
            self._look_at(body[:NAME_NBYTES], BlockHash(body[NAME_NBYTES:]))
        elif kind == RING:
            self._take_ring(body)

    def begin_block(self, request: int, index: int, header: bytes) -> IncomingBlock:
        """As FrameHandler."""
        work = self._put(request)
        if work is None:
            raise MalformedFrame("block", "of a PUT that is under way", request)
        return work.begin(index, header)

    def end_block(self, request: int, index: int, block: IncomingBlock) -> None:
        """As FrameHandler."""
        work = self._put(request)
        assert work is not None, "a cancelled PUT has no block under way"
        self._answer_put(request, work, work.end(index, block))

    def _on_request(self, kind: int, number: int, request: Request) -> None:
        unread = self._outbox.small_nbytes
        if unread > UNREAD_NBYTES:
            raise MalformedFrame("unread answers", f"at most {UNREAD_NBYTES} bytes", unread)
        if number in self._work:
            raise MalformedFrame("request", "a number that is free", number)
        self._show_ring(request.version)
        store = self._serving.stores(request.format_id)
        if store is None:
            self._end(number, "unknown format")
        elif len(self._work) >= REQUESTS:
            self._end(number, "busy")
        elif kind == PUT:
            self._on_put(number, store, request.blocks)
        else:
            self._on_get(number, store, request)

    def _on_put(self, number: int, store: HostStore, names: list[BlockHash]) -> None:
        work = PutWork(store, names, request=number)
        self._work[number] = work
        self._watch(work)
        self._answer_put(number, work, work.first_answer())

    def _answer_put(self, number: int, work: PutWork, answer: bytes) -> None:
        if work.done:
            self._stop(number)
            answer += self._ended(number, "done")
        self._outbox.post(answer)

    def _on_get(self, number: int, store: HostStore, request: Request) -> None:
        names = request.blocks
        in_place = request.in_place and self._serving.settings.same_host
        payload = store.payload_nbytes
        pinned = Pinned(
            self._serving.budget,
            len(names) * payload if in_place else OutgoingBlocks.pinned_nbytes(payload, len(names)),
        )
        begin = partial(self._tell_places if in_place else self._send, number, store, names, pinned)
        if pinned.budget.take(pinned.nbytes):
            pinned.had = True
            begin()
            return
        self._work[number] = pinned
        pinned.waiter = pinned.budget.wait(
            pinned.nbytes,
            seconds=min(request.budget_ms / 1e3, self._serving.settings.call_s),
            granted=partial(self._granted, pinned, begin),
            refused=partial(self._end, number, "busy"),
        )
        if pinned.waiter is None:
            self._end(number, "busy")

    def _granted(self, pinned: Pinned, begin: Callable[[], None]) -> None:
        pinned.waiter = None
        pinned.had = True
        begin()

    def _send(self, number: int, store: HostStore, names: list[BlockHash], pinned: Pinned) -> None:
        counts = ReadCounts(self._serving.on_read)
        work = GetWork(pinned, outbox=self._outbox)

        def closed() -> None:
            counts.tell()
            work.closed()

        transfer = OutgoingBlocks(
            store, list(enumerate(names)), request=number, sent=counts.add,
            last_words=partial(self._last_words, number, counts), progressed=self._progressed, closed=closed,
        )  # fmt: skip
        self._work[number] = work
        self._watch(work)
        work.send(transfer)

    def _last_words(self, number: int, counts: ReadCounts) -> bytes:
        del self._work[number]  # with this its END is said: it cannot be cancelled any more
        segments = tuple(counts.segments)
        counts.tell()
        return self._ended(number, "done", segments)

    def _tell_places(self, number: int, store: HostStore, names: list[BlockHash], pinned: Pinned) -> None:
        shards = store.hold(names)
        lease = self._serving.leases.grant(partial(self._stop, number))
        work = PlacesWork(store, shards, pinned=pinned, lease=lease)
        self._work[number] = work
        counts = ReadCounts(self._serving.on_read)
        for shard in shards:
            if shard is not None:
                counts.add(shard)
        segments = tuple(counts.segments)
        counts.tell()
        places = pack_frame(PLACES, number, encode(work.places()))
        self._outbox.post(places + self._ended(number, "done", segments))

    def _stop(self, number: int) -> None:
        work = self._work.pop(number, None)
        if work is not None:
            work.stop()

    def _end(self, number: int, status: str) -> None:
        """Stop a request, if it has begun, and say how it ended."""
        self._stop(number)
        self._channel.forget_block(number)
        self._outbox.post(self._ended(number, status))

    def _ended(self, number: int, status: str, segments: tuple[BlockHash, ...] = ()) -> bytes:
        version = self._serving.rings.ring.version
        hot = None
        if self._wire >= _HOT_WIRE:
            found = ((segment, self._serving.hot_of(segment)) for segment in segments)
            hot = {bytes(segment): min(extra, _MAX_HOT) for segment, extra in found if extra > 0}
        ended = Ended(status, version.epoch, version.digest, hot or None)  # type: ignore[arg-type]
        return pack_frame(END, number, encode(ended))

    def _on_cancel(self, number: int) -> None:
        work = self._work.get(number)
        if isinstance(work, PlacesWork):
            self._stop(number)  # its END is said
        elif work is not None:
            self._end(number, "cancelled")

    def _progressed(self) -> None:
        self._sent_at = self._loop.time()

    def _watch(self, work: GetWork | PutWork) -> None:
        """Transfers take turns: progress of any of its direction keeps one alive."""
        progress = self._last_sent if isinstance(work, GetWork) else self._last_heard
        work.lease = self._serving.leases.grant(self._stands_still, progress=progress)

    def _last_sent(self) -> float:
        return self._sent_at

    def _last_heard(self) -> float:
        return self._channel.last_heard

    def _stands_still(self) -> None:
        log.warning("bulk channel: a transfer with %s stands still, the connection is closed", self._node)
        self.close()

    def _put(self, request: int) -> PutWork | None:
        work = self._work.get(request)
        return work if isinstance(work, PutWork) else None

    def _look_at(self, format_id: bytes, name: BlockHash) -> None:
        """A reader says that a block of ours is corrupt: our own check decides, not he."""
        store = self._serving.stores(format_id)
        (shard,) = store.hold([name]) if store is not None else (None,)
        if store is None or shard is None:
            return
        check = store.check(shard.header, shard.address)
        if isinstance(check, ShardCheck):
            check.update(shard.payload)
            check = Verdict.WHOLE if check.passed() else Verdict.CORRUPT
        if check is Verdict.CORRUPT:
            store.reject(shard, check)
        store.let_go([shard])

    def _take_ring(self, body: bytes) -> None:
        try:
            state = decode_ring(body)
        except RingError as error:
            raise MalformedFrame("ring", "a ring state", str(error)) from None
        self._serving.rings.install(state)

    def _show_ring(self, theirs: Version) -> None:
        """The other side goes by an older ring than we: give it ours, once."""
        ring = self._serving.rings.ring
        if theirs < ring.version and self._shown != ring.version:
            self._shown = ring.version
            self._outbox.hold_back(pack_frame(RING, 0, encode_ring(ring.state)))

