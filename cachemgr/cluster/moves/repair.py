"""Copies blocks again where copies are missing: nodes long down, nodes back again, pushes that failed.

    down for `settings.down_s`     what it should hold goes to the next owners, once
    back after having been down    what it missed goes to it; its own arena survived, so only the difference
    all the time, slowly           whatever is here goes to owners that lack it

For the first two the first live owner of a block is the one that acts, so that owners do not all ask about
the same blocks; the slow walk needs no luck with that, as every holder walks, and asks before it gives.

Invariants
- At most `settings.copy_bytes_per_s` over time.
- Nothing is let go here; copies with next owners are surplus copies.

Threads: the IO thread; arenas are listed off the loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from cachemgr.cluster.background import Background, Pace
from cachemgr.cluster.contract import Peer, Peers, Rings
from cachemgr.cluster.moves.arcs import SLICES, ArcSet, owned_arcs
from cachemgr.cluster.moves.giver import Giver
from cachemgr.cluster.moves.mover import Stores
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, Version, position_of
from cachemgr.shard import BlockAddress

log = logging.getLogger(__name__)

WALK_S = 600.0
"""One walk over all that is here."""

_LOOK_S = 1.0
_ARCS_AT_ONCE = 64


class Repair:
    """`start` it once there is a ring; `close` it before the peers. `walk_s`: what one slow walk takes."""

    def __init__(
        self,
        rings: Rings,
        peers: Peers,
        *,
        stores: Stores,
        settings: ClusterSettings,
        clock: Callable[[], float],
        walk_s: float = WALK_S,
    ) -> None:
        self._rings = rings
        self._peers = peers
        self._stores = stores
        self._settings = settings
        self._clock = clock
        self._walk_step_s = walk_s / len(SLICES)
        pace = Pace(settings.copy_bytes_per_s, clock=clock)
        self._giver = Giver(pace, call_s=settings.call_s, clock=clock)
        self._was_down: set[NodeId] = set()
        self._made_up_for: dict[NodeId, Version] = {}
        """Nodes long down → the ring under which their blocks were copied to the next owners."""
        self._slice = 0
        self._walk_at = 0.0
        self._background = Background("repair", self._look)

    def start(self) -> None:
        """Begin; the first slow walk starts a step from now."""
        self._walk_at = self._clock() + self._walk_step_s
        self._background.start()

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`) and gauges (every other name)."""
        return {
            "cluster_repaired_blocks_total": float(self._giver.given),
            "cluster_nodes_down": float(len(self._was_down)),
            "cluster_nodes_made_up_for": float(len(self._made_up_for)),
        }

    async def forget(self, store: HostStore) -> None:
        """A store goes away: nothing of this uses it any more when this returns."""
        await self._background.restart()

    async def close(self) -> None:
        """Stop where it is. Idempotent."""
        await self._background.close()

    async def _look(self) -> float:
        others = {peer.node: peer for peer in self._peers.others()}
        self._was_down &= others.keys()
        for node in self._made_up_for.keys() - others.keys():
            del self._made_up_for[node]
        self._was_down.update(peer.node for peer in others.values() if peer.down_since is not None)
        for peer in others.values():
            back = peer.node in self._was_down and peer.down_since is None
            if back and await self._give_what_it_missed(peer):
                self._was_down.discard(peer.node)
                self._made_up_for.pop(peer.node, None)
        for node in self._long_down():
            version = self._rings.ring.version
            if self._made_up_for.get(node) != version and await self._make_up_for(node):
                self._made_up_for[node] = version
        if self._clock() >= self._walk_at:
            self._walk_at = self._clock() + self._walk_step_s
            await self._walk(SLICES[self._slice])
            self._slice = (self._slice + 1) % len(SLICES)
        return _LOOK_S

    def _long_down(self) -> list[NodeId]:
        now, limit = self._clock(), self._settings.down_s
        return [
            peer.node
            for peer in self._peers.others()
            if peer.down_since is not None and now - peer.down_since >= limit
        ]

    async def _make_up_for(self, node: NodeId) -> bool:
        """Copy what a node long down should hold to the next owners; False if some are to be asked again."""
        log.info("node %s is down for %g s: copying what it should hold", node, self._settings.down_s)
        return await self._spread(self._arcs_of(node), only_first=True, to=None)

    async def _give_what_it_missed(self, peer: Peer) -> bool:
        """Copy what a node that is back lacks; False if it is in trouble again."""
        return await self._spread(self._arcs_of(peer.node), only_first=True, to=peer.node)

    async def _walk(self, arcs: ArcSet) -> None:
        """Copy what any owner lacks of what is here; who is in trouble is asked on the next walk."""
        await self._spread(arcs, only_first=False, to=None)

    def _arcs_of(self, node: NodeId) -> ArcSet:
        return owned_arcs(self._rings.ring, node)

    async def _spread(self, arcs: ArcSet, *, only_first: bool, to: NodeId | None) -> bool:
        """Give blocks in `arcs` to those that should hold them (only `to`, if given) and lack them.

        `only_first`: only blocks of which this node is the first live owner, or which no live owner had
        before.
        """
        version, whole = self._rings.ring.version, True
        for store in list(self._stores()):
            for part in arcs.parts(_ARCS_AT_ONCE):
                blocks = await asyncio.to_thread(store.resident, *part.arrays())
                for node, lacking in self._wanted(blocks, only_first=only_first).items():
                    if to is None or node == to:
                        whole &= await self._give(node, store, lacking)
                if self._rings.ring.version != version:
                    return False
        return whole

    def _wanted(
        self, blocks: Sequence[BlockAddress], *, only_first: bool
    ) -> dict[NodeId, list[BlockAddress]]:
        """Other nodes that should hold blocks now → which."""
        ring, me, down = self._rings.ring, self._rings.node, set(self._long_down())
        owners = 1 + ring.replicas
        wanted: dict[NodeId, list[BlockAddress]] = {}
        for block in blocks:
            position = position_of(block.segment)
            live = [node for node in ring.owners(position, owners + len(down)) if node not in down][:owners]
            if only_first and not self._acts(live, ring.owners(position, owners)):
                continue
            for node in live:
                if node != me:
                    wanted.setdefault(node, []).append(block)
        return wanted

    def _acts(self, live: Sequence[NodeId], owners: Sequence[NodeId]) -> bool:
        """True if it is this node's turn: the first of those that owned the block all along and answer."""
        for node in live:
            if node == self._rings.node:
                return True
            peer = self._peers.peer(node)
            if node in owners and peer is not None and peer.usable and node not in self._was_down:
                return False
        return True

    async def _give(self, node: NodeId, store: HostStore, blocks: Sequence[BlockAddress]) -> bool:
        """False if the node could not be asked."""
        peer = self._peers.peer(node)
        if peer is None or not peer.usable:
            return False
        await self._giver.give(peer, store, blocks)
        return peer.usable
