"""Another node, as all who want blocks of it see it: calls that end in time and never raise for trouble.

    admitted by the breaker → control call, or bulk transfer over a door that a control call opened
      → answered: latency noted, breaker closed     → trouble: counted by kind, breaker told, a miss

Invariant: nothing is connected before the first call; nothing is left open after `close`.
Threads: the IO thread.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachemgr.cluster.bulk.frames import PeerTrouble, TroubleKind
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.contract import Fetched
from cachemgr.cluster.control.client import ControlClient
from cachemgr.cluster.control.messages import (
    DRAIN,
    LOOKUP,
    OPEN,
    PULL,
    DrainRequest,
    LookupRequest,
    MemberStatus,
    OpenRequest,
    PullRequest,
)
from cachemgr.cluster.control.packed import MAX_NAMES, MessageError, pack_arcs, pack_names, unpack_addresses
from cachemgr.cluster.control.peer_calls import PeerCalls
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.cluster.settings import ClusterSettings, split_address
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, Version
from cachemgr.shard import BlockAddress

OpenDoor = Callable[[], Awaitable[BulkDoor]]
"""Asks the peer for a door into its bulk channel; PeerTrouble in trouble."""

_BULK_KINDS: dict[Trouble, TroubleKind] = {
    Trouble.DEADLINE: "silent",
    Trouble.LOST: "broken",
    Trouble.GARBAGE: "malformed",
    Trouble.BUSY: "busy",
    Trouble.WIRE: "versions",
    Trouble.PLAINTEXT: "plaintext",
}

_log = logging.getLogger(__name__)


class Bulk(Protocol):
    """The bulk channel to one node; PeerTrouble in trouble."""

    async def get(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        """As Peer.get."""
        ...

    async def put(self, store: HostStore, blocks: Sequence[BlockHash], *, deadline: float) -> list[bool]:
        """As Peer.put."""
        ...

    async def close(self) -> None:
        """Let go of sockets."""
        ...


class ConnectedPeer:
    """Implements `Peer` over a control client and a bulk channel."""

    def __init__(
        self,
        node: NodeId,
        address: str,
        *,
        control: ControlClient,
        bulk: Callable[[NodeId, OpenDoor], Bulk],
        settings: ClusterSettings,
        host: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: the host_token of this node. `bulk` makes the bulk channel, which asks for doors."""
        self._node = node
        self.address = address
        self._control = control
        self._bulk = bulk(node, self._open_door)
        self._settings = settings
        self._host = host
        self._clock = clock
        fair_s = settings.lookup_s / 2  # a look-up was given all of it, and has spent some on its way here
        self._calls = PeerCalls(node, open_s=settings.breaker_s, fair_s=fair_s, clock=clock)
        self._drained = False
        self._probed_at = clock()

    @property
    def node(self) -> NodeId:
        """Its id on the ring."""
        return self._node

    @property
    def usable(self) -> bool:
        """False while its breaker is open, it is draining, or no wire version is common."""
        calls = self._calls
        return calls.breaker.closed and not (self.draining or calls.problem or calls.closed)

    @property
    def draining(self) -> bool:
        """It said that it leaves, and was not seen to have come back."""
        return self._drained or self._control.draining

    @property
    def down_since(self) -> float | None:
        """When it was last found down, if it has not answered since; monotonic seconds."""
        return self._calls.breaker.down_since

    @property
    def load(self) -> float:
        """Seconds that a request of ours is expected to wait there: latency seen × requests in flight."""
        return self._calls.latency.seconds * (1 + self._calls.running)

    @property
    def heard_at(self) -> float:
        """When it last answered; when we began, if it never did."""
        return self._calls.heard_at

    @property
    def opened(self) -> int:
        """How often its breaker opened."""
        return self._calls.breaker.opened

    @property
    def troubles(self) -> Counter[str]:
        """Failed calls by kind."""
        return self._calls.troubles

    @property
    def status(self) -> MemberStatus:
        """For people."""
        state = self._calls.breaker.state
        if state == "closed" and self._calls.problem:
            state = "refused"
        elif state == "closed" and self.draining:
            state = "draining"
        elif state == "closed" and self._control.greeted is None:
            state = "unknown"
        down_s = 0.0 if self.down_since is None else self._clock() - self.down_since
        return MemberStatus(self._node, self.address, state, down_s, self.load, self._calls.problem[:200])

    async def get(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        """Bring what it has of `blocks` into `store`, checked and published, in the order asked."""
        miss = Fetched((False,) * len(blocks))
        arrived: tuple[bool, ...] = ()

        async def work() -> Fetched:
            nonlocal arrived
            try:
                return await self._bulk.get(store, blocks, deadline=deadline)
            except PeerTrouble as trouble:
                arrived = trouble.arrived
                raise

        fetched = await self._calls.run(work, miss=miss, deadline=deadline, timed=True) if blocks else miss
        return Fetched(arrived) if fetched is miss and arrived else fetched

    async def put(self, store: HostStore, blocks: Sequence[BlockHash], *, deadline: float) -> list[bool]:
        """Give it blocks of ours; True for each that it acknowledged: published there, or there already."""
        miss = [False] * len(blocks)

        async def work() -> list[bool]:
            try:
                return await self._bulk.put(store, blocks, deadline=deadline)
            except PeerTrouble as trouble:
                miss[:] = trouble.arrived or miss
                raise

        return await self._calls.run(work, miss=miss, deadline=deadline) if blocks else miss

    async def lookup(
        self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float
    ) -> list[BlockAddress | None]:
        """What it has of `names` in its own arenas; all None in trouble."""

        async def work() -> list[BlockAddress | None]:
            found: list[BlockAddress | None] = []
            for first in range(0, len(names), MAX_NAMES):
                part = names[first : first + MAX_NAMES]
                request = LookupRequest(format_id=format_id, names=pack_names(part))
                reply = await self._control.call(LOOKUP, request, deadline=deadline)
                found += _as_asked(unpack_addresses(reply.addresses), part)
            return found

        return await self._calls.run(work, miss=[None] * len(names), deadline=deadline) if names else []

    async def list_arcs(
        self,
        format_id: bytes,
        low: npt.NDArray[np.uint64],
        high: npt.NDArray[np.uint64],
        *,
        after: bytes,
        deadline: float,
    ) -> tuple[list[BlockAddress], bytes] | None:
        """A part of what it has in these arcs and the cursor for the next part (empty: no more).

        None in trouble. `after`: the cursor of the part before, empty at first.
        """
        request = PullRequest(format_id=format_id, low=pack_arcs(low), high=pack_arcs(high), after=after)

        async def work() -> tuple[list[BlockAddress], bytes] | None:
            reply = await self._control.call(PULL, request, deadline=deadline)
            addresses = [address for address in unpack_addresses(reply.addresses) if address is not None]
            if reply.cursor and (not addresses or reply.cursor <= after):
                raise MessageError("cursor: must lie behind that of the part before")
            return addresses, reply.cursor

        return await self._calls.run(work, miss=None, deadline=deadline)

    async def moved(self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float) -> bool:
        """Tell it that these blocks are with us now: it drops those that the ring gives to others."""

        async def work() -> bool:
            for first in range(0, len(names), MAX_NAMES):
                part = pack_names(names[first : first + MAX_NAMES])
                request = PullRequest(format_id=format_id, moved=part)
                await self._control.call(PULL, request, deadline=deadline)
            return True

        return await self._calls.run(work, miss=False, deadline=deadline) if names else True

    async def exchange_ring(self, *, deadline: float) -> Version | None:
        """Show it our ring, take its ring if that is newer; the version it has then. None in trouble."""

        async def work() -> Version | None:
            return await self._control.exchange_ring(deadline=deadline)

        return await self._calls.run(work, miss=None, deadline=deadline)

    async def say_drain(self, *, deadline: float) -> bool:
        """Tell it that we leave. False in trouble."""

        async def work() -> bool:
            await self._control.call(DRAIN, DrainRequest(), deadline=deadline)
            return True

        return await self._calls.run(work, miss=False, deadline=deadline)

    @property
    def probe_due(self) -> bool:
        """Its breaker waits for somebody to try, or nothing was heard or tried for `settings.breaker_s`."""
        if not self._calls.breaker.closed:
            return self._calls.breaker.due
        last = self._probed_at if not self.usable else max(self._probed_at, self.heard_at)
        return self._clock() - last >= self._settings.breaker_s

    async def probe(self) -> bool:
        """See whether it is there and what it says of itself; over a new connection if it was not usable."""
        self._probed_at = self._clock()
        deadline = self._probed_at + self._settings.call_s
        fresh = not self.usable

        async def work() -> bool:
            if fresh:
                await self._control.greet(deadline=deadline)
            await self._control.exchange_ring(deadline=deadline)
            self._drained = False  # whether it drains, it just said
            return True

        return await self._calls.run(work, miss=False, deadline=deadline)

    def drained(self) -> None:
        """It says that it leaves: no new requests go there until it is seen to have come back."""
        if not self._drained:
            _log.info("peer %s drains: no new requests go there", self._node)
        self._drained = True

    def hurry(self) -> None:
        """It gave a sign of life: if it is not usable, it is worth a probe now."""
        self._calls.breaker.hurry()
        if not self.usable:
            self._probed_at = -math.inf

    def retire(self) -> None:
        """Take no new calls from now on."""
        self._calls.closed = True

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, let those under way finish for `grace_s`. Idempotent."""
        await self._calls.finish(grace_s)
        await self._bulk.close()
        await self._control.close()

    async def _open_door(self) -> BulkDoor:
        deadline = self._clock() + self._settings.call_s
        try:
            reply = await self._control.call(OPEN, OpenRequest(), deadline=deadline)
        except ControlTrouble as trouble:
            raise PeerTrouble(_BULK_KINDS.get(trouble.kind, "refused"), str(trouble)) from None
        greeted = self._control.greeted
        same_host = self._settings.same_host and greeted is not None and greeted.host == self._host
        host = reply.host or split_address(self.address, field="address")[0]
        return BulkDoor(host, reply.port, reply.ticket, same_host=same_host, tls=reply.tls)


def _as_asked(
    addresses: Sequence[BlockAddress | None], names: Sequence[BlockHash]
) -> Sequence[BlockAddress | None]:
    """MessageError unless there is an answer for each name, and about that name."""
    if len(addresses) != len(names):
        raise MessageError(f"addresses: must be {len(names)}, got {len(addresses)}")
    for address, name in zip(addresses, names, strict=True):
        if address is not None and address.hash != name:
            raise MessageError("addresses: must be of the blocks asked for")
    return addresses
