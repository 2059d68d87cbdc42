"""Gives every block committed here to the owners that the ring names, in the background.

A block goes to the first 1 + replicas owners of its segment's position but ourselves; if we are none of them,
our own copy is a surplus one. Each owner has a lane of its own, so that a slow one holds up nobody else; a
lane sends many blocks at a time. An owner that is down or refuses is asked a bounded number of times; what it
lacks then is left to `repair`. A new ring sends what still waits to the owners that it names.

A block is *committed(n)* once arenas in n distinct failure domains published and acknowledged it, ours
included. How many replicas what is already resident has is the mover's: another number is a new ring like any
other.

Invariants
- No more than `settings.queue_blocks` blocks wait, over all lanes; more are dropped and counted.
- Each block is in the lane of an owner at most once.

Threads: the IO thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from cachemgr.cluster.contract import Peers, Rings
from cachemgr.cluster.moves.replication_lane import Copying, OwnerLane
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, Ring, position_of
from cachemgr.shard import address_of

CopiesObserver = Callable[[BlockHash, frozenset[str]], None]
"""Hears of a block and the failure domains that hold it, each time there is one more."""


@dataclass(slots=True)
class ReplicationCounts:
    """Totals since the start of the node."""

    replicated_blocks: int = 0
    """Copies that another node acknowledged."""
    replication_dropped: int = 0
    """Blocks that found the queue full."""
    replication_failed: int = 0
    """Copies given up: the owner was down or refused too often."""
    committed1_blocks: int = 0
    """Blocks that reached one failure domain."""
    committed2_blocks: int = 0
    committed3_blocks: int = 0
    """Three or more."""

    def totals(self) -> dict[str, float]:
        """Every total as `cluster_<what>_total`."""
        return {f"cluster_{name}_total": float(value) for name, value in asdict(self).items()}


class Replicator:
    """`offer` it what was committed; `close` it before the peers."""

    def __init__(
        self,
        rings: Rings,
        peers: Peers,
        *,
        settings: ClusterSettings,
        clock: Callable[[], float],
        copies: CopiesObserver | None = None,
    ) -> None:
        self._rings = rings
        self._peers = peers
        self._settings = settings
        self._clock = clock
        self._copies = copies
        self._counts = ReplicationCounts()
        self._lanes: dict[NodeId, OwnerLane] = {}
        self._waiting = 0
        self._closed = False
        rings.listen(self._reroute)

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of the chain `hashes` was committed in `store`: give it to its owners, some time."""
        if self._closed:
            return
        address = address_of(hashes, index)
        block = Copying(store, address, position_of(address.segment))
        self._committed(block, self._rings.node)
        if self._waiting >= self._settings.queue_blocks:
            self._counts.replication_dropped += 1
        else:
            self._route(block)

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`) and gauges (every other name)."""
        return {**self._counts.totals(), "cluster_replication_queue": float(self._waiting)}

    @property
    def idle(self) -> bool:
        """True if no block waits for an owner."""
        return not self._waiting

    async def forget(self, store: HostStore) -> None:
        """A store goes away: nothing of this uses it any more when this returns."""
        for node, lane in list(self._lanes.items()):
            for block in await lane.forget(store):
                block.tries.pop(node, None)
                self._waiting -= not block.tries

    async def close(self) -> None:
        """Stop giving; what waits is not given. Idempotent."""
        self._closed = True
        for lane in list(self._lanes.values()):
            await lane.close()
        self._lanes.clear()
        self._waiting = 0

    def _route(self, block: Copying) -> None:
        """Put the block in the lanes of the owners that have not had it yet."""
        waited = bool(block.tries)
        for node in self._owners(block.position):
            if node in block.tries or node in block.reached or node in block.given_up:
                continue
            block.tries[node] = 0
            self._lane(node).add(block)
        self._waiting += bool(block.tries) - waited

    def _owners(self, position: int) -> list[NodeId]:
        ring = self._rings.ring
        return [node for node in ring.owners(position, 1 + ring.replicas) if node != self._rings.node]

    def _lane(self, node: NodeId) -> OwnerLane:
        lane = self._lanes.get(node)
        if lane is None:
            lane = OwnerLane(
                node, self._peers, call_s=self._settings.call_s, clock=self._clock, answered=self._answered
            )
            self._lanes[node] = lane
        return lane

    def _answered(self, block: Copying, node: NodeId, taken: bool) -> None:
        """A lane is done with a block: its owner acknowledged it, or was asked often enough."""
        if block.tries.pop(node, None) is None:
            return  # a new ring took it out of that lane meanwhile
        self._waiting -= not block.tries
        if taken:
            block.reached.add(node)
            self._counts.replicated_blocks += 1
            self._committed(block, node)
        else:
            block.given_up.add(node)
            self._counts.replication_failed += 1

    def _committed(self, block: Copying, node: NodeId) -> None:
        """One more arena holds the block."""
        spec = self._rings.ring.state.node(node)
        domain = spec.failure_domain if spec is not None else str(node)
        if domain in block.domains:
            return
        block.domains.add(domain)
        match len(block.domains):
            case 1:
                self._counts.committed1_blocks += 1
            case 2:
                self._counts.committed2_blocks += 1
            case 3:
                self._counts.committed3_blocks += 1
        if self._copies is not None:
            self._copies(block.address.hash, frozenset(block.domains))

    def _reroute(self, ring: Ring, previous: Ring | None) -> None:
        """A new ring: what waits goes to its owners, and no longer to those that are none."""
        if self._closed:
            return
        blocks = {id(block): block for lane in self._lanes.values() for block in lane.waiting()}
        for block in blocks.values():
            owners = set(self._owners(block.position))
            for node in [node for node in block.tries if node not in owners]:
                self._lanes[node].remove(block)
                del block.tries[node]
            self._waiting -= not block.tries
            self._route(block)
