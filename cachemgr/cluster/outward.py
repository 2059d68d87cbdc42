"""What every process of a node has of the cluster: the way to other nodes, for reading and for giving.

Threads: the IO thread.
"""

import logging
import time
from pathlib import Path
from random import Random

from cachemgr.cluster.background import Background, Pace
from cachemgr.cluster.bulk.client import BulkClient
from cachemgr.cluster.certificates import certificates_of
from cachemgr.cluster.certificates.current import LOOK_S
from cachemgr.cluster.control.client import ControlClient
from cachemgr.cluster.control.grpc_service import Channel, GrpcChannel, UnreachableChannel
from cachemgr.cluster.control.host_token import host_token
from cachemgr.cluster.control.peer import Bulk, ConnectedPeer, OpenDoor
from cachemgr.cluster.control.peers import ConnectedPeers
from cachemgr.cluster.fetch.fetcher import Fetcher
from cachemgr.cluster.fetch.hot_keys import HotHints
from cachemgr.cluster.fetch.read_repair import ReadRepair
from cachemgr.cluster.moves.giver import Giver
from cachemgr.cluster.moves.replicator import CopiesObserver, Replicator
from cachemgr.cluster.node_lock import NodeLock, NodeRingFile
from cachemgr.cluster.rings import RingsInForce
from cachemgr.cluster.settings import ClusterSettings, is_loopback
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, NodeSpec, Ring, crowded_domain, first_state
from cachemgr.settings import CacheSettings

log = logging.getLogger(__name__)


class Outward:
    """Made and closed on the loop."""

    def __init__(
        self,
        cache: CacheSettings,
        settings: ClusterSettings,
        *,
        lock: NodeLock,
        copies: CopiesObserver | None = None,
    ) -> None:
        """SettingsError for files that cannot be read, RingError for what cannot be on a ring."""
        self.cluster = cache.cluster
        self.settings = settings
        self.host = host_token(Path(cache.directory))
        self.clock = time.monotonic
        self.certificates = certificates_of(settings, cluster=cache.cluster, node=cache.node)
        self._certificate_watch = Background("certificates", self._look_at_certificates)
        self.me = NodeSpec(cache.node, settings.address, settings.domain, settings.weight)
        self.stores: dict[bytes, HostStore] = {}
        self._ring_file = NodeRingFile(Path(settings.state_dir) / "ring.json", lock)
        self.rings = RingsInForce(
            NodeId(cache.node),
            file=self._ring_file,
            previous_s=settings.previous_s,
            given=first_state(settings.members, replicas=settings.replicas) if settings.members else None,
        )
        self._crowded = ""
        self.rings.listen(self._warn_of_crowding)
        self.peers = ConnectedPeers(rings=self.rings, make=self._peer, settings=settings, clock=self.clock)
        self.peers.start()
        if self.certificates is not None:
            self._certificate_watch.start()
        self._hints = HotHints(settings=settings, clock=self.clock)
        self._repair = ReadRepair(self.peers, self.new_giver(), clock=self.clock)
        self.fetcher = Fetcher(
            self.rings,
            self.peers,
            hints=self._hints,
            repair=self._repair,
            settings=settings,
            clock=self.clock,
            random=Random(),
        )
        self.replicator = Replicator(
            self.rings, self.peers, settings=settings, clock=self.clock, copies=copies
        )

    def new_giver(self) -> Giver:
        """Gives blocks to peers at the pace of the settings, counted for one purpose."""
        pace = Pace(self.settings.copy_bytes_per_s, clock=self.clock)
        return Giver(pace, call_s=self.settings.call_s, clock=self.clock)

    def follow_the_node(self) -> None:
        """Know the rings that the process knows which is the node: nobody tells them to this one."""
        if self._ring_file.changed():
            self.rings.reread()

    def all_stores(self) -> list[HostStore]:
        """The stores that are open now."""
        return list(self.stores.values())

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`) and gauges (every other name)."""
        ends = self.certificates
        return {
            "cluster_epoch": float(self.rings.version.epoch),
            **({"cluster_certificate_expires_seconds": ends.expires_s} if ends is not None else {}),
            **self.peers.counters(),
            **self.fetcher.counters(),
            **self._repair.counters(),
            **self.replicator.counters(),
        }

    async def forget(self, store: HostStore) -> None:
        """A store goes away: nothing here uses it any more when this returns."""
        await self.fetcher.forget(store)
        await self._repair.forget(store)
        await self.replicator.forget(store)

    async def close(self) -> None:
        """End what is on its way, then let go of the other nodes. Idempotent."""
        await self._certificate_watch.close()
        await self.fetcher.close()
        await self._repair.close()
        await self.replicator.close()
        await self.peers.close()

    def _warn_of_crowding(self, ring: Ring, previous: Ring | None) -> None:
        """Say it when it begins, not with every vnode that moves."""
        line = crowded_domain(ring.state)
        if line and not self._crowded:
            log.warning("ring %d: %s", ring.state.epoch, line)
        self._crowded = line

    def _peer(self, node: NodeId, address: str) -> ConnectedPeer:
        control = ControlClient(
            node,
            address,
            cluster=self.cluster,
            rings=self.rings,
            connect=lambda target: self._channel(node, target),
            call_s=self.settings.call_s,
            clock=self.clock,
        )
        return ConnectedPeer(
            node,
            address,
            control=control,
            bulk=self._bulk,
            settings=self.settings,
            host=self.host,
            clock=self.clock,
        )

    def _channel(self, node: NodeId, address: str) -> Channel:
        """To that node and no other. A ring may name addresses on a network: in the clear none is dialled."""
        if self.certificates is None and not is_loopback(address):
            return UnreachableChannel(address)
        return GrpcChannel(address, certificates=self.certificates, node=node)

    async def _look_at_certificates(self) -> float:
        assert self.certificates is not None, "the watch is started with certificates only"
        self.certificates.look()
        return LOOK_S

    def _bulk(self, node: NodeId, open_door: OpenDoor) -> Bulk:
        return BulkClient(
            node,
            me=self.rings.node,
            open_channel=open_door,
            rings=self.rings,
            settings=self.settings,
            certificates=self.certificates,
        )
