"""Answers the control calls of other nodes, and the questions of people.

    bytes → decoded, bounds checked → cluster and wire version checked → handler → reply, with our version,
    whether we are leaving, and our ring if the asker's is older

Invariants
- A node of another cluster learns nothing and changes nothing. With certificates, a node is who its
  certificate says; that of a node on no ring we know opens no bulk connection, and lists and drops no blocks.
- A node that drains still answers everything; every reply says that it drains.
- No handler waits for another node but that of a proposed ring, which membership bounds.

Threads: the IO thread; listings are made on one thread of their own.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cachemgr.cluster.bulk.tickets import Tickets
from cachemgr.cluster.control.grpc_service import Handler
from cachemgr.cluster.control.listings import Listings
from cachemgr.cluster.control.messages import (
    DRAIN,
    HELLO,
    LOOKUP,
    OPEN,
    PULL,
    RING,
    STATUS,
    WIRE_MAX,
    WIRE_MIN,
    WIRE_WITH_RING,
    DrainReply,
    DrainRequest,
    HelloReply,
    HelloRequest,
    LookupReply,
    LookupRequest,
    Method,
    NodeStatus,
    OpenReply,
    OpenRequest,
    PullReply,
    PullRequest,
    Reply,
    Request,
    RingReply,
    RingRequest,
    StatusReply,
    StatusRequest,
    common_wire,
    encode_message,
)
from cachemgr.cluster.control.packed import MessageError, pack_addresses, unpack_names
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.cluster.rings import RingsInForce
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import Epoch, NodeId, RingConflict, RingError, RingState, Version, decode_ring
from cachemgr.shard import BlockAddress

Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Reply)

Publish = Callable[[RingState, Version], Awaitable[Version | None]]
"""`membership.publish`: a ring and the version it replaces → None if it won, else what it lost to."""

Moved = Callable[[NodeId, bytes, Sequence[BlockHash]], int]
"""That node says that it has these blocks of a format now; how many of them are let go for that."""

_HELD_AT_ONCE = 128
"""Names held at once: the store's lock is short only for few."""


def _nobody_listens(node: NodeId) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Door:
    """Where the bulk server listens; an empty `host` is that of the control service."""

    port: int
    host: str = ""
    tls: bool = False


class ControlServer:
    """The handlers; `GrpcServer(server.handlers())` puts them on the wire."""

    def __init__(
        self,
        *,
        cluster: str,
        rings: RingsInForce,
        stores: Mapping[bytes, HostStore],
        tickets: Tickets,
        door: Callable[[], Door],
        publish: Publish,
        moved: Moved,
        status: Callable[[], NodeStatus],
        drained: Callable[[NodeId], None],
        host: bytes,
        heard: Callable[[NodeId], None] = _nobody_listens,
        wires: tuple[int, int] = (WIRE_MIN, WIRE_MAX),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stores` by format id, read at every call; `host`: our host_token.

        `drained` hears who leaves, `heard` who says Hello.
        """
        self._cluster = cluster
        self._rings = rings
        self._stores = stores
        self._tickets = tickets
        self._door = door
        self._publish = publish
        self._moved = moved
        self._status = status
        self._drained = drained
        self._host = host
        self._heard = heard
        self._wires = wires
        self._draining = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cluster-listing")
        self._listings = Listings(self._executor, clock=clock)
        self.calls: dict[str, int] = {}
        """Calls answered, by method; refused ones as `refused`."""

    @property
    def draining(self) -> bool:
        """True once `drain` was called."""
        return self._draining

    def drain(self) -> None:
        """Say in every reply from now on that new requests should go elsewhere."""
        self._draining = True

    def close(self) -> None:
        """Stop the thread of listings. Call it after the wire is closed. Idempotent."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def handlers(self) -> dict[str, Handler]:
        """Method → handler of encoded requests."""
        return {
            HELLO.name: self._answering(HELLO, self._hello),
            LOOKUP.name: self._answering(LOOKUP, self._lookup),
            OPEN.name: self._answering(OPEN, self._open),
            RING.name: self._answering(RING, self._ring),
            PULL.name: self._answering(PULL, self._pull),
            DRAIN.name: self._answering(DRAIN, self._drain),
            STATUS.name: self._answering(STATUS, self._say_status),
        }

    def _answering(self, method: Method[Q, R], handle: Callable[[Q], Awaitable[R]]) -> Handler:
        async def answer(data: bytes, caller: NodeId | None = None) -> bytes:
            try:
                request = method.decode_request(data)
                self._judge(method, request, caller)
                reply = await handle(request)
            except (MessageError, RingError) as error:
                self._count("refused")
                raise ControlTrouble(Trouble.INVALID, str(error)) from None
            except ControlTrouble:
                self._count("refused")
                raise
            self._count(method.name)
            return encode_message(self._headed(request, reply))

        return answer

    def _judge(self, method: Method[Any, Any], request: Request, caller: NodeId | None) -> None:
        if request.cluster != self._cluster:
            raise ControlTrouble(Trouble.CLUSTER, f"this node is not of cluster {request.cluster!r}")
        low, high = self._wires
        if method is not HELLO and not low <= request.wire <= high:
            raise ControlTrouble(Trouble.WIRE, f"wire versions {low}..{high} are spoken, not {request.wire}")
        if caller is None:
            return
        needs_ring = method is OPEN or method is PULL
        if request.node != caller and (request.node or needs_ring):  # people ask as nobody
            text = f"the certificate of node {caller} came as node {request.node!r}"
            raise ControlTrouble(Trouble.IDENTITY, text)
        if needs_ring and not self._on_a_ring(caller):
            # its certificate is good: it may be joining, by a ring newer than ours. Shown that, we go by it
            text = f"node {caller} is on no ring that is known here: show yours, and ask again"
            raise ControlTrouble(Trouble.BUSY, text)

    def _headed(self, request: Request, reply: Reply) -> Reply:
        reply.epoch, reply.digest = self._rings.version
        reply.draining = self._draining
        shown = isinstance(reply, RingReply)  # has the ring in a field of its own, in every wire version
        if request.wire >= WIRE_WITH_RING and request.version < self._rings.version and not shown:
            reply.ring = self._rings.encoded
        return reply

    def _on_a_ring(self, node: NodeId) -> bool:
        """One that a change took off the ring gives its blocks away for a while: `earlier` is as good."""
        if not self._rings.known:
            return False
        rings = (self._rings.ring, *self._rings.earlier)
        return any(node == spec.id for ring in rings for spec in ring.state.nodes)

    def _require_ring(self) -> None:
        """What works by the ring waits for the first one: the bulk channel, and changes."""
        if not self._rings.known:
            raise ControlTrouble(Trouble.BUSY, "this node is looking for the ring: ask again in a moment")

    def _count(self, what: str) -> None:
        self.calls[what] = self.calls.get(what, 0) + 1

    async def _hello(self, request: HelloRequest) -> HelloReply:
        low, high = self._wires
        # nothing in common is for the asker to see: only it knows whether it ever asks again
        request.wire = common_wire(request.wire_min, request.wire_max, ours=self._wires) or 0
        if request.node:
            self._heard(NodeId(request.node))
        return HelloReply(node=self._rings.node, wire_min=low, wire_max=high, host=self._host)

    async def _lookup(self, request: LookupRequest) -> LookupReply:
        names = unpack_names(request.names)
        if request.format_id:
            store = self._stores.get(request.format_id)
            stores = [] if store is None else [store]
        else:
            stores = list(self._stores.values())
        found: list[BlockAddress | None] = [None] * len(names)
        for store in stores:
            for first in range(0, len(names), _HELD_AT_ONCE):
                part = names[first : first + _HELD_AT_ONCE]
                for offset, address in enumerate(_addresses(store, part)):
                    found[first + offset] = address or found[first + offset]
        return LookupReply(addresses=pack_addresses(found))

    async def _open(self, request: OpenRequest) -> OpenReply:
        if not request.node:
            raise ControlTrouble(Trouble.INVALID, "node: must be set, as a ticket is for one node")
        self._require_ring()
        door = self._door()
        ticket = self._tickets.issue(NodeId(request.node))
        return OpenReply(host=door.host, port=door.port, ticket=ticket, tls=door.tls)

    async def _ring(self, request: RingRequest) -> RingReply:
        accepted = False
        shown = request.version
        if request.state and request.replaces is not None:
            self._require_ring()
            state = decode_ring(request.state)
            shown = state.version
            replaces = Version(Epoch(request.replaces.epoch), request.replaces.digest)
            try:
                accepted = await self._publish(state, replaces) is None
            except RingConflict:
                accepted = False
        elif request.state and shown > self._rings.version:
            state = decode_ring(request.state)
            shown = state.version
            accepted = self._rings.install(state)
        newer = self._rings.version > shown
        return RingReply(accepted=accepted, state=self._rings.encoded if newer else b"")

    async def _pull(self, request: PullRequest) -> PullReply:
        asker, store = NodeId(request.node), self._stores.get(request.format_id)
        if store is None:
            return PullReply()
        if request.moved:
            return PullReply(dropped=self._moved(asker, request.format_id, unpack_names(request.moved)))
        addresses, cursor = await self._listings.part(
            store, asker=asker, low=request.low, high=request.high, after=request.after
        )
        return PullReply(addresses=addresses, cursor=cursor)

    async def _drain(self, request: DrainRequest) -> DrainReply:
        if request.node:
            self._drained(NodeId(request.node))
        return DrainReply()

    async def _say_status(self, request: StatusRequest) -> StatusReply:
        return StatusReply(status=self._status())


def _addresses(store: HostStore, names: Sequence[BlockHash]) -> list[BlockAddress | None]:
    held = store.hold(names)
    try:
        return [None if shard is None else shard.address for shard in held]
    finally:
        store.let_go([shard for shard in held if shard is not None])
