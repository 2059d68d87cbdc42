"""What the process that is the node has of the cluster: it answers, and keeps blocks where they belong.

    control, bulk server            answer
    membership                      where rings come from
    mover, handover, repair         bring what the ring gives us, give away what it takes, make up for losses
    hot keys, balance               what is read too often here

Threads: the IO thread.
"""

import asyncio
import logging
from random import Random

from cachemgr.cluster.bulk.server import BulkServer
from cachemgr.cluster.bulk.tickets import Tickets
from cachemgr.cluster.contract import Membership, Spawn
from cachemgr.cluster.control.grpc_service import GrpcServer
from cachemgr.cluster.control.messages import FormatStatus, NodeStatus
from cachemgr.cluster.control.server import ControlServer, Door
from cachemgr.cluster.fetch.hot_keys import HotKeys
from cachemgr.cluster.fetch.hot_spread import HotSpread
from cachemgr.cluster.members.static_members import StaticMembers
from cachemgr.cluster.moves.balance import Balance
from cachemgr.cluster.moves.handover import Handover
from cachemgr.cluster.moves.mover import Mover
from cachemgr.cluster.moves.repair import Repair
from cachemgr.cluster.outward import Outward
from cachemgr.cluster.settings import split_address
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.redis_address import RedisAddress
from cachemgr.ring import RingState, Version

log = logging.getLogger(__name__)

_GRACE_S = 1.0
_ALIVE_BEATS = 5
_BEAT_S = 1.0


class Listening:
    """`open` it once this process is the node."""

    def __init__(self, outward: Outward, *, spawn: Spawn) -> None:
        self._out = outward
        settings, rings, peers = outward.settings, outward.rings, outward.peers
        clock, stores = outward.clock, outward.all_stores
        self.membership = _membership(outward)
        self._spread = HotSpread(stores, peers, outward.new_giver())
        self._hot = HotKeys(rings, self._spread, spawn=spawn, settings=settings, clock=clock)
        self._balance = Balance(
            rings, peers, membership=self.membership, settings=settings, clock=clock
        )
        self.mover = Mover(rings, peers, stores=stores, settings=settings, clock=clock)
        self._handover = Handover(rings, peers, stores=stores, settings=settings, clock=clock)
        self._repair = Repair(rings, peers, stores=stores, settings=settings, clock=clock)
        tickets = Tickets(clock)
        self._bulk = BulkServer(
            outward.stores.get,
            tickets=tickets,
            rings=rings,
            settings=settings,
            certificates=outward.certificates,
            on_read=self._on_read,
            hot_of=self._hot.extra,
        )
        self._door = Door(0)
        self._control = ControlServer(
            cluster=outward.cluster,
            rings=rings,
            stores=outward.stores,
            tickets=tickets,
            door=lambda: self._door,
            publish=self._publish,
            moved=self._handover.acknowledged,
            status=self._status,
            drained=peers.drained,
            heard=peers.heard,
            host=outward.host,
            clock=clock,
        )
        self._server = GrpcServer(self._control.handlers(), certificates=outward.certificates)
        self._joining: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen. SettingsError or OSError if the address cannot be had: nothing is left then."""
        listen = self._out.settings.listen
        host, _ = split_address(listen, field="listen")
        try:
            port = await self._bulk.start(host)
            self._door = Door(port, tls=self._bulk.tls)
            await self._server.start(listen)
        except BaseException:
            await self._stop(grace_s=0.0)
            raise
        self._joining = asyncio.create_task(self._join(), name="join")
        self._joining.add_done_callback(_tell_failure)

    async def _join(self) -> None:
        """Find the ring, which may take seconds, and begin to keep blocks where it says."""
        await self.membership.start(self._out.rings, self._out.peers)
        self.mover.start()
        self._handover.start()
        self._repair.start()
        self._balance.start()

    @property
    def drained(self) -> bool:
        """True if the ring gives this node nothing, and what it had is with others."""
        return self._handover.drained()

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`) and gauges (every other name)."""
        rates = self._balance.vnode_qps.values()
        return {
            **self.mover.counters(),
            **self._handover.counters(),
            **self._repair.counters(),
            **self._balance.counters(),
            "cluster_hot_segments": float(len(self._hot.hot())),
            "cluster_bulk_pinned_bytes": float(self._bulk.pinned_nbytes),
            "cluster_foreign_callers_total": float(self._bulk.foreign + self._server.foreign),
            "vnode_qps": max(rates, default=0.0),
        }

    def hot(self) -> dict[str, float]:
        """The segments that are read most, in hex, and their reads per second, for whoever may know."""
        return {segment.hex(): rate for segment, rate in self._hot.top()}

    async def forget(self, store: HostStore) -> None:
        """A store goes away: nothing here uses it any more when this returns."""
        await self.mover.forget(store)
        await self._handover.forget(store)
        await self._repair.forget(store)
        await self._spread.forget(store)

    async def close(self) -> None:
        """Tell the others that we leave, finish what they read, stop. Idempotent."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)  # what it ended with was logged
        self._control.drain()
        await self._out.peers.say_drain()
        await self._bulk.drain()
        for part in (self._balance, self._repair, self._handover, self.mover, self.membership):
            await part.close()
        await self._stop(grace_s=_GRACE_S)

    async def _stop(self, *, grace_s: float) -> None:
        await self._server.close(grace_s)
        await self._bulk.close()
        self._control.close()
        self._hot.close()

    def _on_read(self, segment: BlockHash, blocks: int, nbytes: int) -> None:
        self._hot.observe(segment)
        self._balance.on_read(segment, blocks, nbytes)

    async def _publish(self, state: RingState, replaces: Version) -> Version | None:
        return await self.membership.publish(state, replaces=replaces)

    def _status(self) -> NodeStatus:
        out = self._out
        previous = out.rings.previous
        formats = [
            FormatStatus(store.format_id, payload_nbytes=store.payload_nbytes, blocks=store.blocks)
            for store in out.all_stores()
        ]
        return NodeStatus(
            node=out.rings.node,
            address=out.settings.address,
            blocks=sum(one.blocks for one in formats),
            nbytes=sum(one.blocks * one.payload_nbytes for one in formats),
            pulled=out.rings.pulled,
            previous_epoch=previous.state.epoch if previous is not None else 0,
            members=out.peers.status(),
            formats=formats,
            trouble=[line for line in (self.membership.trouble, out.rings.trouble) if line],
            counters={**out.counters(), **self.counters()},
            hot={bytes(segment): extra for segment, extra in self._hot.hot().items() if extra},
        )


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("joining the cluster failed; this node goes on with the ring it has", exc_info=error)


def _membership(outward: Outward) -> Membership:
    settings, me = outward.settings, outward.me
    if not settings.redis:
        return StaticMembers(
            me, settings.members, replicas=settings.replicas, call_s=settings.call_s, random=Random()
        )
    from cachemgr.cluster.members.redis_members import RedisMembers  # late: others need no Redis
    from cachemgr.cluster.members.redis_ring_store import RedisRingStore
    from cachemgr.redis_client import RedisClient

    client = RedisClient(RedisAddress.parse(settings.redis), timeout_s=settings.call_s)
    store = RedisRingStore(client, cluster=outward.cluster, alive_s=_ALIVE_BEATS * _BEAT_S)
    return RedisMembers(me, store, replicas=settings.replicas, random=Random())
