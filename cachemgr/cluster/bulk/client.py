"""The client of one peer's bulk channel: one connection, opened when it is needed, many requests in flight
on it.

`get` brings blocks into a store: over TCP into reserved slots, or copied from the peer's arena if it is on
this host.
`put` gives blocks away. Both raise PeerTrouble, and nothing else, when the peer does not do as it should;
what has arrived whole stays published. A peer costs at most the deadline, an owner that does not begin to
answer at most
`lookup_s`.

Invariants: at most IN_FLIGHT requests are on their way; others wait for their turn within their deadline.
Nothing is asked twice, but that a peer whose arenas turn out to be out of reach is asked again over the
network. Threads: the IO thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cachemgr.cluster.bulk.ages import ConnectionAges
from cachemgr.cluster.bulk.client_calls import ClientCall, GetCall, PutCall, is_here
from cachemgr.cluster.bulk.client_channel import ClientChannel
from cachemgr.cluster.bulk.frames import REQUEST_BLOCKS, PeerTrouble
from cachemgr.cluster.bulk.hello import WIRE_VERSIONS, Hello
from cachemgr.cluster.bulk.incoming import Outcome
from cachemgr.cluster.bulk.messages import Ended, Places, Request, encode, join_names
from cachemgr.cluster.bulk.opening import BulkDoor, open_stream
from cachemgr.cluster.bulk.same_host import PeerArenas, bring
from cachemgr.cluster.bulk.watch import AnswerWatch
from cachemgr.cluster.certificates import Certificates
from cachemgr.cluster.contract import Fetched, Rings
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId
from cachemgr.shard import HEADER_NBYTES, BlockAddress

IN_FLIGHT = 32
_OPENINGS = 2
"""A channel may be told to go away at the moment when it opens."""
_REQUEST_NBYTES = 64 << 20
_COPIED_AT_ONCE = 4 << 20
"""Bytes copied from an arena before others of the loop have their turn."""

_Block = TypeVar("_Block", BlockAddress, BlockHash)
OpenChannel = Callable[[], Awaitable[BulkDoor]]


_CLOSED = PeerTrouble("broken", "this client is closed")


class BulkClient:
    """`get` and `put` of one peer. Made on the loop that uses it."""

    def __init__(
        self,
        node: NodeId,
        *,
        me: NodeId,
        open_channel: OpenChannel,
        rings: Rings,
        settings: ClusterSettings,
        certificates: Certificates | None = None,
        versions: tuple[int, int] = WIRE_VERSIONS,
    ) -> None:
        """`open_channel` asks the peer's control service for a door; PeerTrouble or OSError if there is
        none.
        """
        self.node = node
        self._me = me
        self._open_channel = open_channel
        self._rings = rings
        self._settings = settings
        self._certificates = certificates
        self._versions = versions
        self._loop = asyncio.get_running_loop()
        self._turns = asyncio.Semaphore(IN_FLIGHT)
        self._channel: ClientChannel | None = None
        """The one that takes new requests."""
        self._channels: set[ClientChannel] = set()
        """All that are open, retired ones too."""
        self._ages = ConnectionAges(certificates, loop=self._loop)
        self._opening: asyncio.Task[PeerTrouble | None] | None = None
        self._arenas = PeerArenas()
        self.in_place = False
        """The peer's arenas are read where they lie: it offers them, and none was found to be out of
        reach.
        """
        self._closed = False

    @property
    def connected(self) -> bool:
        """A connection is open that takes requests."""
        return self._channel is not None

    async def get(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        """Bring what the peer has of `blocks` into `store`, in order. PeerTrouble carries what had
        arrived.
        """
        arrived: list[bool] = []
        nbytes = 0
        hot: dict[BlockHash, int] = {}
        for part in _parts(blocks, store.payload_nbytes):
            call = GetCall(store, part, answered=self._loop.create_future())
            try:
                await self._turn(deadline)
                try:
                    ended, call = await self._get(call, store, part, deadline)
                finally:
                    self._turns.release()
            except PeerTrouble as trouble:
                trouble.arrived = _padded([*arrived, *(trouble.arrived or call.arrived)], len(blocks))
                raise
            arrived += call.arrived
            nbytes += call.nbytes
            hot.update({BlockHash(segment): extra for segment, extra in (ended.hot or {}).items()})
            if ended.status != "done":
                break
        return Fetched(_padded(arrived, len(blocks)), nbytes, hot)

    async def put(self, store: HostStore, blocks: Sequence[BlockHash], *, deadline: float) -> list[bool]:
        """Give the peer blocks of `store`; True for each that it acknowledged. PeerTrouble as `get`."""
        taken: list[bool] = []
        for part in _parts(blocks, store.payload_nbytes):
            call = PutCall(store, part, answered=self._loop.create_future())
            try:
                await self._turn(deadline)
                try:
                    channel = self._channel or await self._open(deadline)
                    number = channel.ask(call, self._request(store, part, deadline))
                    await self._answer(channel, call, number, deadline=deadline, begun_by=deadline)
                finally:
                    self._turns.release()
            except PeerTrouble as trouble:
                trouble.arrived = _padded([*taken, *call.arrived], len(blocks))
                raise
            taken += call.arrived
        return list(_padded(taken, len(blocks)))

    async def close(self) -> None:
        """End every call and connection. Idempotent."""
        self._closed = True
        self._ages.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        for channel in tuple(self._channels):
            channel.fail(PeerTrouble("broken", "this node closes"))
            await channel.closed()
        self._arenas.close()

    async def _get(
        self, call: GetCall, store: HostStore, blocks: Sequence[BlockAddress], deadline: float
    ) -> tuple[Ended, GetCall]:
        names = [block.hash for block in blocks]
        channel = self._channel or await self._open(deadline)
        begun_by = min(deadline, self._loop.time() + self._settings.lookup_s)  # opening is not its answer
        request = self._request(store, names, deadline, in_place=self.in_place)
        number = channel.ask(call, request)
        try:
            ended = await self._answer(channel, call, number, deadline=deadline, begun_by=begun_by)
            if call.places is None or await self._copy(store, call, blocks, deadline=deadline):
                return ended, call
        finally:  # also if nobody waits any more at the moment when the answer comes
            if call.places is not None:
                channel.blocks_read(number, len(blocks))
        self.in_place = False  # it is on another host, or its files are not for us
        over_network = GetCall(store, blocks, answered=self._loop.create_future())
        return await self._get(over_network, store, blocks, deadline)

    async def _copy(
        self, store: HostStore, call: GetCall, blocks: Sequence[BlockAddress], *, deadline: float
    ) -> bool:
        """Copy what lies on this host; False if it does not.

        Within one lease: what takes longer than that is a miss.
        """
        places = call.places
        assert isinstance(places, Places)
        arenas = [self._arenas.open(file) for file in places.files]
        if any(arena is None for arena in arenas):
            return False
        nbytes = HEADER_NBYTES + store.payload_nbytes
        until = min(deadline, self._loop.time() + self._settings.lease_s)
        unyielded = 0
        for index, (file, offset) in enumerate(zip(places.file_of, places.offsets, strict=True)):
            arena = arenas[file] if file >= 0 else None
            shard = arena.shard(offset, nbytes) if arena is not None else None
            if shard is None:
                continue
            if unyielded >= _COPIED_AT_ONCE:
                await asyncio.sleep(0)
                unyielded = 0
            if self._loop.time() >= until:
                break
            unyielded += nbytes
            self._judge(bring(store, blocks[index], shard), store, call, index)
        return True

    def _judge(self, outcome: Outcome, store: HostStore, call: GetCall, index: int) -> None:
        name = call.name(index)
        if outcome is Outcome.PUBLISHED:
            call.nbytes += HEADER_NBYTES + store.payload_nbytes
            call.arrived[index] = True
        elif outcome is Outcome.NOT_KEPT:
            call.arrived[index] = is_here(store, name)
        else:
            if self._channel is not None:
                self._channel.complain(store.format_id, name)
            where = f"block {index}, read where it lies"
            raise PeerTrouble("corrupt" if outcome is Outcome.CORRUPT else "foreign", where)

    async def _answer(
        self, channel: ClientChannel, call: ClientCall, number: int, *, deadline: float, begun_by: float
    ) -> Ended:
        """The last word on a request; PeerTrouble if there is none in time."""
        watch = AnswerWatch(
            channel, call, begun_by=begun_by, deadline=deadline, silence_s=self._settings.lookup_s
        )
        try:
            ended = await call.answered
        finally:
            watch.stop()
            channel.give_up(number)  # nothing if it has ended
        if ended.status == "busy":
            raise PeerTrouble("busy", f"{self.node} has too many requests")
        return ended

    def _request(
        self, store: HostStore, names: Sequence[BlockHash], deadline: float, *, in_place: bool = False
    ) -> bytes:
        version = self._rings.ring.version
        budget_ms = min(max(0, int(1e3 * (deadline - self._loop.time()))), 86_400_000)
        return encode(
            Request(store.format_id, version.epoch, version.digest, budget_ms, join_names(names), in_place)
        )

    async def _turn(self, deadline: float) -> None:
        """Wait for a turn; `self._turns.release()` ends it."""
        if self._closed:
            raise PeerTrouble("refused", "this client is closed")
        if not self._turns.locked():
            await self._turns.acquire()
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.acquire()
        except TimeoutError:
            raise PeerTrouble("busy", f"{IN_FLIGHT} requests to {self.node} are under way") from None

    async def _open(self, deadline: float) -> ClientChannel:
        """The channel that takes new requests; whoever comes while it is being opened waits for the same
        one.
        """
        for _ in range(_OPENINGS):
            if self._opening is None:
                self._opening = self._loop.create_task(self._try_open())
            opening = self._opening
            done, _ = await asyncio.wait({opening}, timeout=max(0.0, deadline - self._loop.time()))
            if not done:
                raise PeerTrouble("silent", f"{self.node} opened no bulk channel in time")
            trouble = _CLOSED if opening.cancelled() else opening.result()
            if trouble is not None:
                raise PeerTrouble(trouble.kind, trouble.detail)
            if self._channel is not None:
                return self._channel
        raise PeerTrouble("broken", f"{self.node} closes the bulk channel as soon as it is open")

    async def _try_open(self) -> PeerTrouble | None:
        """Open a channel; the trouble if there is none. Ends within `call_s`."""
        try:
            async with asyncio.timeout(self._settings.call_s):
                await self._enter(again=True)
        except PeerTrouble as trouble:
            return trouble
        except TimeoutError:
            return PeerTrouble("silent", f"no bulk channel within {self._settings.call_s:g} s")
        except OSError as error:
            return PeerTrouble("refused", str(error))
        finally:
            self._opening = None
        return None

    async def _enter(self, *, again: bool) -> None:
        """Ask for a door and go through it. One that closes meanwhile, as the peer drains, is asked for
        again.
        """
        door = await self._open_channel()
        generation = self._ages.generation
        try:
            stream, wire = await open_stream(
                door, node=self.node, hello=Hello(self._versions, door.ticket, self._me),
                certificates=self._certificates, plaintext=self._settings.bulk_plaintext,
            )  # fmt: skip
        except OSError:
            if not again:
                raise
            return await self._enter(again=False)
        self.in_place = door.same_host and self._settings.same_host
        self._channel = channel = ClientChannel(
            stream, rings=self._rings, wire=wire, patience_s=self._settings.lease_s,
            retired=self._on_retired, ended=self._on_ended,
        )  # fmt: skip
        self._channels.add(channel)
        if door.tls:
            too_old = PeerTrouble("broken", "its certificates are in force no more")
            self._ages.add(
                channel, generation=generation, leave=channel.retire, end=lambda: channel.fail(too_old)
            )

    def _on_retired(self, channel: ClientChannel) -> None:
        if self._channel is channel:
            self._channel = None

    def _on_ended(self, channel: ClientChannel) -> None:
        self._channels.discard(channel)
        self._ages.discard(channel)


def _parts(blocks: Sequence[_Block], payload_nbytes: int) -> list[Sequence[_Block]]:
    """What one request each asks for."""
    size = max(1, min(REQUEST_BLOCKS, _REQUEST_NBYTES // payload_nbytes))
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def _padded(arrived: Sequence[bool], length: int) -> tuple[bool, ...]:
    return (*arrived, *(False,) * (length - len(arrived)))
