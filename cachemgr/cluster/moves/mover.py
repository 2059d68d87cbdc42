"""Pulls what the ring gives this node and others have: joins, drains, moved vnodes, more replicas, restarts.

There is one mechanism for all of them. For each store this node remembers the arcs whose blocks it has seen;
what it owns and has not seen it goes through, some arcs at a time: it asks those that may have the blocks
what they have, brings what is missing, and tells them what is here now. It asks, in this order,

    the owners by the rings before → the other owners by the ring in force

as old owners let a block go only after new owners have it: who finds it gone with them finds it with a new
owner. A node that starts has seen nothing; what it kept over its restart is not copied again, so one that
comes back brings only what it missed.

`mark_pulled` is called once every store has seen everything; until then the rings before are kept, over a
restart too. A peer in trouble is asked again until it has been down for `settings.down_s`. What a peer lists
and does not give (evicted there, no room here) is asked for `ROUNDS` times.

Invariants
- Nothing is told to be here that is not published here.
- At most `settings.copy_bytes_per_s` over time, and one `get` at a time.
- Killed anywhere, nothing was let go that had not arrived, and the next start goes on.

Threads: the IO thread.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Protocol

from cachemgr.cluster.background import Background, Pace
from cachemgr.cluster.contract import Peer, Peers, Rings
from cachemgr.cluster.moves.arcs import ArcSet, arcs_of, owned_arcs, split_at_vnodes
from cachemgr.cluster.moves.giver import addresses_of, batches
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, Ring, Version, position_of
from cachemgr.shard import BlockAddress

log = logging.getLogger(__name__)

ROUNDS = 3
"""How often blocks that a peer lists and does not give are asked for."""

_ARCS_AT_ONCE = 64
_LOOK_S = 1.0
"""How often a store that was opened since is looked for; new rings wake at once."""
_LONGEST_PAUSE_S = 30.0


class MovingRings(Rings, Protocol):
    """What moves need of the rings beyond what readers do."""

    @property
    def pulled(self) -> bool:
        """True if this node has all that the ring in force gave it."""
        ...

    def mark_pulled(self, version: Version) -> None:
        """All that the ring of `version` gave this node is here; void if another one is in force by now."""
        ...


Stores = Callable[[], Sequence[HostStore]]
"""The stores that are open now, each the same object for as long as it is open."""


@dataclass(slots=True)
class MoveCounts:
    """Totals since the start of the node."""

    pulled_blocks: int = 0
    pulled_bytes: int = 0
    pull_troubles: int = 0
    """Parts of the ring that a peer could not be asked about; they are asked about again."""
    pull_skipped_blocks: int = 0
    """Listed by a peer, and not given by anyone."""

    def totals(self) -> dict[str, float]:
        """Every total as `cluster_<what>_total`."""
        return {f"cluster_{name}_total": float(value) for name, value in asdict(self).items()}


class _Outcome(IntEnum):
    """How going through some arcs ended; the worst of several counts."""

    SEEN = 0
    LACKING = 1
    TROUBLE = 2
    OUTDATED = 3
    """Another ring is in force by now."""


@dataclass(slots=True)
class _Seen:
    """What one store has of what the ring gives this node."""

    arcs: ArcSet
    rounds: int = 0
    """How often what is left was gone through."""


class Mover:
    """`start` it once there is a ring; `close` it before the peers."""

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
        self._pace = Pace(settings.copy_bytes_per_s, clock=clock)
        self._counts = MoveCounts()
        self._seen: dict[HostStore, _Seen] = {}
        self._settled: Version | None = None
        self._pause_s = _LOOK_S
        self._background = Background("mover", self._look)

    def start(self) -> None:
        """Begin, with whatever the last process left undone."""
        self._rings.listen(self._changed)
        self._background.start()

    @property
    def settled(self) -> bool:
        """True if every store has seen all that the ring in force gives this node."""
        if self._settled is None:  # perhaps before there is a ring
            return False
        return self._settled == self._rings.ring.version and set(self._stores()) <= self._seen.keys()

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`) and gauges (every other name)."""
        return {**self._counts.totals(), "cluster_move_settled": float(self.settled)}

    async def forget(self, store: HostStore) -> None:
        """A store goes away: nothing of this uses it any more when this returns."""
        self._seen.pop(store, None)
        await self._background.restart()

    async def close(self) -> None:
        """Stop where it is; the next start goes on. Idempotent."""
        await self._background.close()

    def _changed(self, ring: Ring, previous: Ring | None) -> None:
        self._pause_s = _LOOK_S
        for seen in self._seen.values():
            seen.rounds = 0
        self._background.wake()

    async def _look(self) -> float:
        stores = list(self._stores())
        if not stores or self.settled:
            return _LOOK_S
        self._seen = {store: self._seen.get(store) or _Seen(ArcSet()) for store in stores}
        version = self._rings.ring.version
        worst = _Outcome.SEEN
        for store in stores:
            worst = max(worst, await self._catch_up(store, self._seen[store]))
        if worst is _Outcome.OUTDATED or version != self._rings.ring.version:
            return 0.0
        if worst is _Outcome.SEEN:
            self._settled = version
            self._rings.mark_pulled(version)
            self._pause_s = _LOOK_S
            return _LOOK_S
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._pause_s / 2

    async def _catch_up(self, store: HostStore, seen: _Seen) -> _Outcome:
        """Go through what `store` has not seen of what this node owns."""
        ring = self._rings.ring
        owned = owned_arcs(ring, self._rings.node)
        seen.arcs &= owned
        seen.rounds += 1
        worst = _Outcome.SEEN
        for arcs, sources in self._parts(owned - seen.arcs):
            outcome = await self._pull(store, arcs, sources)
            if outcome is _Outcome.LACKING and seen.rounds >= ROUNDS:
                outcome = _Outcome.SEEN
            if outcome is _Outcome.SEEN:
                seen.arcs |= arcs
            worst = max(worst, outcome)
            if worst is _Outcome.OUTDATED:
                break
        return worst

    def _parts(self, arcs: ArcSet) -> Iterator[tuple[ArcSet, tuple[NodeId, ...]]]:
        """`arcs`, some at a time, and who may have what lies there, in the order to ask."""
        ring, earlier = self._rings.ring, tuple(self._rings.earlier)
        grouped: dict[tuple[NodeId, ...], list[tuple[int, int]]] = {}
        for low, high in split_at_vnodes(arcs, (ring, *earlier)):
            now = ring.owners(high, 1 + ring.replicas)
            before = [node for old in earlier for node in old.owners(high, 1 + old.replicas)]
            order = dict.fromkeys((*(node for node in before if node not in now), *now))
            order.pop(self._rings.node, None)
            grouped.setdefault(tuple(order), []).append((low, high))
        for sources, pairs in grouped.items():
            for part in arcs_of(pairs).parts(_ARCS_AT_ONCE):
                yield part, sources

    async def _pull(self, store: HostStore, arcs: ArcSet, sources: Sequence[NodeId]) -> _Outcome:
        """Bring what `sources` have in `arcs` and `store` has not."""
        version = self._rings.ring.version
        outcome = _Outcome.SEEN
        lacking: list[BlockAddress] = []
        for node in sources:
            peer = self._peers.peer(node)
            if peer is None or self._gone(peer):
                continue
            if not await self._pull_from(peer, store, arcs, lacking):
                self._counts.pull_troubles += 1
                outcome = _Outcome.TROUBLE
            if self._rings.ring.version != version:
                return _Outcome.OUTDATED
        skipped = 0  # what did not come from one may have come from the next
        for batch in batches(range(len(lacking)), store.payload_nbytes):
            skipped += len(store.missing([lacking[index].hash for index in batch]))
        if skipped and outcome is _Outcome.SEEN:
            self._counts.pull_skipped_blocks += skipped
            outcome = _Outcome.LACKING
        return outcome

    def _gone(self, peer: Peer) -> bool:
        """Down for so long that it is not waited for: `repair` makes up for it; once back, it gives."""
        since = peer.down_since
        return since is not None and self._clock() - since >= self._settings.down_s

    async def _pull_from(
        self, peer: Peer, store: HostStore, arcs: ArcSet, lacking: list[BlockAddress]
    ) -> bool:
        """One peer's part of `_pull`; adds to `lacking` what did not come. False if it was in trouble."""
        low, high = arcs.arrays()
        version, cursor = self._rings.ring.version, b""
        while self._rings.ring.version == version:
            part = await peer.list_arcs(
                store.format_id, low, high, after=cursor, deadline=self._clock() + self._settings.call_s
            )
            if part is None:
                return False
            blocks = [block for block in part[0] if position_of(block.segment) in arcs]
            for batch in batches(range(len(blocks)), store.payload_nbytes):
                lacking += await self._bring(peer, store, [blocks[index] for index in batch])
            if not part[1]:
                return True
            if part[1] == cursor:
                return False  # it would go round for ever
            cursor = part[1]
        return True

    async def _bring(
        self, peer: Peer, store: HostStore, blocks: Sequence[BlockAddress]
    ) -> list[BlockAddress]:
        """Get what is missing of `blocks`, tell the peer what is here then; what still is not."""
        missing = [blocks[index] for index in store.missing([block.hash for block in blocks])]
        if missing:
            await self._pace.spend(len(missing) * store.payload_nbytes)
            fetched = await peer.get(store, missing, deadline=self._clock() + self._settings.call_s)
            self._counts.pulled_blocks += sum(fetched.arrived)
            self._counts.pulled_bytes += fetched.nbytes
        here = {block.hash for block in addresses_of(store, [block.hash for block in blocks])}
        ring = self._rings.ring
        moved = [
            block.hash
            for block in blocks
            if block.hash in here
            and peer.node not in ring.owners(position_of(block.segment), 1 + ring.replicas)
        ]
        if moved:
            await peer.moved(store.format_id, moved, deadline=self._clock() + self._settings.call_s)
        return [block for block in blocks if block.hash not in here]
