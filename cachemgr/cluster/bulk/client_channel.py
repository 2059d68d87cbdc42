"""The client's end of one open bulk connection: many requests in flight, told apart by number.

A request that ends early (deadline, cancellation) is cancelled at the server, and what still comes of it is
read and forgotten; only a connection on which nothing comes any more is closed for it.

Invariants
- Every call is answered exactly once, at the latest when the connection ends.
- A retired connection (GOAWAY, a corrupt block) takes no new calls, and closes when the last one has ended.
Threads: the IO thread.
"""

import asyncio
import itertools
from collections.abc import Callable

from cachemgr.cluster.bulk.channel import Channel
from cachemgr.cluster.bulk.client_calls import DISCARD_NBYTES, ClientCall, GetCall, PutCall
from cachemgr.cluster.bulk.frames import (
    CANCEL,
    CORRUPT,
    COUNT,
    END,
    FROM_SERVER,
    GOAWAY,
    LEASE,
    REQUEST_BLOCKS,
    RING,
    WANT,
    MalformedFrame,
    PeerTrouble,
    pack_frame,
)
from cachemgr.cluster.bulk.incoming import IncomingBlock, Outcome
from cachemgr.cluster.bulk.messages import Ended, decode
from cachemgr.cluster.bulk.streams import Stream
from cachemgr.cluster.contract import Rings
from cachemgr.ring import RingError, Version, decode_ring, encode_ring

CORRUPT_WIRE = 2
"""The wire version from which a peer hears of blocks of its own that are corrupt."""

_REQUESTS = 1 << 32


class ClientChannel:
    """A FrameHandler, and who asks through it."""

    def __init__(
        self,
        stream: Stream,
        *,
        rings: Rings,
        wire: int,
        patience_s: float,
        retired: Callable[["ClientChannel"], None],
        ended: Callable[["ClientChannel"], None],
    ) -> None:
        """`patience_s`: how long a request that was given up may stay unanswered.

        `retired` is called once, when no new calls are taken; `ended` when all is let go.
        """
        self._loop = asyncio.get_running_loop()
        self._rings = rings
        self._wire = wire
        self._patience_s = patience_s
        self._retired = retired
        self._ended = ended
        self._channel = Channel(stream, accepts=FROM_SERVER, handler=self, clock=self._loop.time)
        self._calls: dict[int, ClientCall] = {}
        self._given_up: dict[int, asyncio.TimerHandle] = {}
        self._reading: set[int] = set()
        """Requests whose blocks are being copied from where they lie."""
        self._numbers = itertools.count(1)
        self._shown: Version | None = None
        """Of the ring that we have sent."""
        self.ready = True
        """It takes new calls."""
        self._task = self._loop.create_task(self._run())

    @property
    def last_heard(self) -> float:
        """When the last bytes came, loop seconds."""
        return self._channel.last_heard

    def ask(self, call: ClientCall, request: bytes) -> int:
        """Send a request (the body of its frame); `call.answered` is its answer. The request's number."""
        number = next(self._numbers) % _REQUESTS
        while number in self._calls:
            number = next(self._numbers) % _REQUESTS
        self._calls[number] = call
        self._channel.outbox.post(pack_frame(call.kind, number, request))
        return number

    def give_up(self, number: int) -> None:
        """Nobody waits for this request any more. Nothing if it has ended."""
        call = self._calls.get(number)
        if call is None or number in self._given_up:
            return
        call.abandon()
        self._channel.drop_block(number)
        if isinstance(call, PutCall) and call.transfer is not None:
            self._channel.outbox.remove(call.transfer)
        self._given_up[number] = self._loop.call_later(self._patience_s, self._lost_patience)
        self._channel.outbox.post(pack_frame(CANCEL, number))

    def blocks_read(self, number: int, count: int) -> None:
        """All `count` blocks of an in-place answer are copied, or not wanted any more.

        The server hears of it with the next request, if one comes at once.
        """
        self._channel.outbox.hold_back(pack_frame(LEASE, number, COUNT.pack(count)))
        self._reading.discard(number)
        self._loop.call_soon(self._flush)

    def complain(self, format_id: bytes, name: bytes) -> None:
        """A block of the peer's is corrupt: it shall look. Then this connection is used no more."""
        if self._wire >= CORRUPT_WIRE:
            self._channel.outbox.post(pack_frame(CORRUPT, 0, format_id + name))
        self.retire()

    def retire(self) -> None:
        """Take no new calls; close when those in flight have ended."""
        if self.ready:
            self.ready = False
            self._retired(self)
        if not self._calls and not self._reading and self._channel.outbox.idle:
            self.fail(PeerTrouble("broken", "the connection is retired"))

    def fail(self, trouble: PeerTrouble) -> None:
        """The connection is over: every call in flight fails with it. Idempotent."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.answered.done():
                call.answered.set_exception(PeerTrouble(trouble.kind, trouble.detail))
        for timer in self._given_up.values():
            timer.cancel()
        self._given_up.clear()
        self._channel.close()
        if self.ready:
            self.ready = False
            self._retired(self)

    def ended_early(self) -> Ended:
        """The last word on a request that ends because nobody has time for more."""
        version = self._rings.ring.version
        return Ended("cancelled", version.epoch, version.digest)

    async def closed(self) -> None:
        """Wait until everything is let go."""
        await asyncio.gather(self._task, return_exceptions=True)

    def on_frame(self, kind: int, request: int, body: bytes) -> None:
        """As FrameHandler."""
        if kind == RING:
            self._take_ring(body)
        elif kind == GOAWAY:
            self.retire()
        elif kind == END:
            self._on_end(self._call(request), request, decode(body, Ended))
        elif kind == WANT:
            self._on_want(self._call(request), request, body)
        else:
            self._call(request).on_frame(kind, body)

    def begin_block(self, request: int, index: int, header: bytes) -> IncomingBlock:
        """As FrameHandler."""
        return self._call(request).begin_block(index, header)

    def end_block(self, request: int, index: int, block: IncomingBlock) -> None:
        """As FrameHandler."""
        call = self._call(request)
        outcome = call.end_block(index, block)
        if not isinstance(call, GetCall) or request in self._given_up:
            return
        if outcome is Outcome.CORRUPT:
            if not call.answered.done():
                call.answered.set_exception(PeerTrouble("corrupt", f"the tag of block {index} is wrong"))
            self.give_up(request)
            self.complain(call.format_id, call.name(index))
        elif call.discarded > DISCARD_NBYTES and not call.answered.done():
            call.answered.set_result(self.ended_early())
            self.give_up(request)

    def _flush(self) -> None:
        self._channel.outbox.flush()
        if not self.ready:
            self.retire()

    async def _run(self) -> None:
        try:
            await self._channel.run()
        except PeerTrouble as trouble:
            self.fail(trouble)
        except MalformedFrame as error:
            self.fail(PeerTrouble("malformed", str(error)))
        except OSError as error:
            self.fail(PeerTrouble("broken", str(error)))
        finally:
            self.fail(PeerTrouble("broken", "the connection is closed"))
            self._ended(self)

    def _call(self, request: int) -> ClientCall:
        call = self._calls.get(request)
        if call is None:
            raise MalformedFrame("request", "one in flight", request)
        call.started = True
        return call

    def _on_end(self, call: ClientCall, request: int, ended: Ended) -> None:
        given_up = self._given_up.pop(request, None)
        if given_up is not None:
            given_up.cancel()
            if isinstance(call, GetCall) and call.places is not None:
                self._channel.outbox.post(pack_frame(LEASE, request, COUNT.pack(REQUEST_BLOCKS)))
        else:
            call.on_end(ended)
            if isinstance(call, GetCall) and call.places is not None:
                self._reading.add(request)
        del self._calls[request]
        self._channel.forget_block(request)
        self._show_ring(ended.version)
        if not self.ready and not self._calls:
            self.retire()

    def _on_want(self, call: ClientCall, request: int, body: bytes) -> None:
        if not isinstance(call, PutCall):
            raise MalformedFrame("want", "an answer to PUT", request)
        transfer = call.wanted(request, body)
        if body and request not in self._given_up:
            self._channel.outbox.add(transfer)

    def _lost_patience(self) -> None:
        self.fail(PeerTrouble("silent", "a cancelled request was never ended"))

    def _take_ring(self, body: bytes) -> None:
        try:
            state = decode_ring(body)
        except RingError as error:
            raise MalformedFrame("ring", "a ring state", str(error)) from None
        self._rings.install(state)

    def _show_ring(self, theirs: Version) -> None:
        """The peer goes by an older ring than we: give it ours, once."""
        ring = self._rings.ring
        if theirs < ring.version and self._shown != ring.version:
            self._shown = ring.version
            self._channel.outbox.post(pack_frame(RING, 0, encode_ring(ring.state)))
