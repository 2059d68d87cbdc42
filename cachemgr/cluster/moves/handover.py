"""Lets go of what the ring gave to others once they have it; gives it to those that did not come for it.

The other side of `mover`. A new owner pulls a block and says that it has it. If by then every owner that is
new since the ring before has said so, this node lets the block go, a moment later, so that a reader who asks
the new owners first and then us finds it in one place or the other. What is not asked for (a new owner was
down, its word got lost, we restarted, rings changed faster than blocks move) is found by passes over the arcs
that were lost: each owner is asked, given what it lacks, and once all have a block it goes as well.

A node that owns nothing, as it drains or has left, also gives its surplus copies to owners that lack them,
and keeps them for its own readers; `drained` says that nothing is here any more that is not with its owners.

Fewer replicas make surplus copies, which stay until they are evicted.

Invariants
- A block is let go only if each owner by the ring in force, but those down for `settings.down_s`, has it or
  was an owner before, and at least one of them said so under this ring.
- What this node owns when its time comes is not let go, whatever was said before.

Threads: the IO thread; arenas are listed off the loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cachemgr.cluster.background import Background, Pace
from cachemgr.cluster.contract import Peers
from cachemgr.cluster.moves.arcs import SLICES, ArcSet, owned_arcs
from cachemgr.cluster.moves.giver import Giver, addresses_of
from cachemgr.cluster.moves.mover import MovingRings, Stores
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, Ring, position_of
from cachemgr.shard import BlockAddress

_ARCS_AT_ONCE = 64
_LOOK_S = 1.0
_IDLE_S = 60.0
_LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class _Told:
    """Who has the blocks of a store, as far as they said so under the ring in force."""

    holders: dict[BlockHash, set[NodeId]] = field(default_factory=dict)
    leaving: dict[BlockHash, BlockAddress] = field(default_factory=dict)
    """What goes soon; in the order of `due`."""
    due: dict[BlockHash, float] = field(default_factory=dict)


class Handover:
    """`acknowledged` is what the control service calls for each `moved` of a peer."""

    def __init__(
        self,
        rings: MovingRings,
        peers: Peers,
        *,
        stores: Stores,
        settings: ClusterSettings,
        clock: Callable[[], float],
    ) -> None:
        self._rings = rings
        self._peers = peers
        self._stores = stores
        self._settings = settings
        self._clock = clock
        pace = Pace(settings.copy_bytes_per_s, clock=clock)
        self._giver = Giver(pace, call_s=settings.call_s, clock=clock)
        self._told: dict[HostStore, _Told] = {}
        self._lost = ArcSet()
        self._before: Ring | None = None
        self._owns = True
        self._left: int | None = None
        """Blocks that owners lacked after the last pass under this ring; None before there was one."""
        self._changed_at = 0.0
        self._next_pass = 0.0
        self._pause_s = _LOOK_S
        self._dropped = 0
        self._background = Background("handover", self._look)

    def start(self) -> None:
        """Begin, with what the rings before gave this node and the one in force does not."""
        for ring in self._rings.earlier:
            self._lose(ring)
        self._settle(self._rings.ring)
        self._rings.listen(self._changed)
        self._background.start()

    def acknowledged(self, node: NodeId, format_id: bytes, names: Sequence[BlockHash]) -> int:
        """`node` says that these blocks are with it now; how many of them go, in a moment, for that."""
        store = next((store for store in self._stores() if store.format_id == format_id), None)
        if store is None:
            return 0
        told = self._told.setdefault(store, _Told())
        here = addresses_of(store, names)
        leaving = 0
        for address in here:
            if position_of(address.segment) not in self._lost:
                continue  # a surplus copy of ours
            told.holders.setdefault(address.hash, set()).add(node)
            if self._has_moved(address, told, asked_all=False):
                leaving += self._let_go_soon(address, told)
        if here:  # its pull goes on: a pass now would give what it is about to take
            self._next_pass = max(self._next_pass, self._clock() + self._settings.call_s)
            self._background.wake()
        return leaving

    def drained(self) -> bool:
        """True if this node owns nothing, and all that was here at the last look is with its owners."""
        return not self._owns and self._left == 0 and not any(told.leaving for told in self._told.values())

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`) and gauges (every other name)."""
        return {
            "cluster_moved_away_blocks_total": float(self._dropped),
            "cluster_given_blocks_total": float(self._giver.given),
            "cluster_blocks_to_hand_over": float(self._left or 0),
            "cluster_drained": float(self.drained()),
        }

    async def forget(self, store: HostStore) -> None:
        """A store goes away: nothing of this uses it any more when this returns."""
        self._told.pop(store, None)
        await self._background.restart()

    async def close(self) -> None:
        """Stop where it is; what is here stays. Idempotent."""
        await self._background.close()

    def _changed(self, ring: Ring, previous: Ring | None) -> None:
        for old in (previous, self._before):
            if old is not None:
                self._lose(old)
        self._settle(ring)
        self._background.wake()

    def _lose(self, before: Ring) -> None:
        """What `before` gave this node for as many owners as there are now is lost, unless still owned."""
        owners = 1 + min(before.replicas, self._rings.ring.replicas)
        self._lost |= owned_arcs(before, self._rings.node, owners)

    def _settle(self, ring: Ring) -> None:
        """Look at everything anew under `ring`."""
        owned = owned_arcs(ring, self._rings.node)
        self._lost -= owned
        self._owns = bool(owned)
        self._before = ring
        self._told.clear()
        self._left = None
        self._changed_at = self._clock()
        self._pause_s = _LOOK_S
        self._next_pass = self._clock() + self._settings.call_s

    async def _look(self) -> float:
        if self._owns and not self._lost:
            return _IDLE_S
        self._drop_due()
        if self._clock() >= self._next_pass:
            await self._pass()
        return min(_LOOK_S, max(0.0, self._next_pass - self._clock()))

    async def _pass(self) -> None:
        """Ask and give all round, for what was lost, and for everything if this node owns nothing."""
        version, left, found = self._rings.ring.version, 0, 0
        parts = [(part, True) for part in self._lost.parts(_ARCS_AT_ONCE)]
        if not self._owns:
            parts += [(part - self._lost, False) for part in SLICES]
        stores = list(self._stores())
        self._told = {store: self._told.get(store, _Told()) for store in stores}
        for store in stores:
            told = self._told[store]
            names: set[BlockHash] = set()
            for arcs, lost in parts:
                blocks = await asyncio.to_thread(store.resident, *arcs.arrays())
                left += await self._give(store, blocks, told)
                if self._rings.ring.version != version:
                    return
                names.update(block.hash for block in blocks)
                if lost:
                    found += len(blocks)
                    self._let_go_moved(blocks, told)
            told.holders = {name: nodes for name, nodes in told.holders.items() if name in names}
        self._left = left
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_pass = self._clock() + self._pause_s
        if not found and self._clock() - self._changed_at > self._settings.previous_s:
            self._lost = ArcSet()

    def _let_go_moved(self, blocks: Sequence[BlockAddress], told: _Told) -> None:
        for block in blocks:
            if self._has_moved(block, told, asked_all=True):
                self._let_go_soon(block, told)

    async def _give(self, store: HostStore, blocks: Sequence[BlockAddress], told: _Told) -> int:
        """Let every owner have `blocks`; how many of them some owner still lacks."""
        ring = self._rings.ring
        wanted: dict[NodeId, list[BlockAddress]] = {}
        for block in blocks:
            for node in ring.owners(position_of(block.segment), 1 + ring.replicas):
                if node not in told.holders.get(block.hash, ()):
                    wanted.setdefault(node, []).append(block)
        for node, lacking in wanted.items():
            peer = self._peers.peer(node)
            if peer is None or not peer.usable:
                continue
            has = await self._giver.give(peer, store, lacking)
            if self._rings.ring is not ring:
                return len(blocks)
            for block, there in zip(lacking, has, strict=True):
                if there:
                    told.holders.setdefault(block.hash, set()).add(node)
        return sum(not self._has_moved(block, told, asked_all=True) for block in blocks)

    def _has_moved(self, block: BlockAddress, told: _Told, *, asked_all: bool) -> bool:
        """True if enough owners said that they have it; `asked_all`: those that had it before, too."""
        holders = told.holders.get(block.hash, set())
        ring, position = self._rings.ring, position_of(block.segment)
        owners = ring.owners(position, 1 + ring.replicas)
        if self._rings.node in owners or holders.isdisjoint(owners):
            return False
        before: tuple[NodeId, ...] = ()
        if not asked_all and (old := self._rings.previous) is not None:
            before = old.owners(position, 1 + old.replicas)
        return all(node in holders or node in before or self._gone(node) for node in owners)

    def _gone(self, node: NodeId) -> bool:
        peer = self._peers.peer(node)
        if peer is None or peer.down_since is None:
            return peer is None
        return self._clock() - peer.down_since >= self._settings.down_s

    def _let_go_soon(self, block: BlockAddress, told: _Told) -> bool:
        if block.hash in told.leaving:
            return False
        told.leaving[block.hash] = block
        told.due[block.hash] = self._clock() + self._settings.lease_s
        return True

    def _drop_due(self) -> None:
        """Drop what may go now. What is being read stays, and is found by the next pass."""
        ring, now = self._rings.ring, self._clock()
        for store, told in self._told.items():
            names = [name for name, due in told.due.items() if due <= now]
            going = []
            for name in names:
                block = told.leaving.pop(name)
                del told.due[name]
                if self._rings.node not in ring.owners(position_of(block.segment), 1 + ring.replicas):
                    going.append(name)
            if going:
                self._dropped += store.drop(going)
