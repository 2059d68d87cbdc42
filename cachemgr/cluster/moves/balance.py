"""Counts what each vnode is read, and moves one away that takes nearly all, if `settings.balance` says so.

A vnode of ours that has more than 80 % of what this node sends, at every look for 30 s, while the node is
busy at all, goes to the least loaded node: one change of the ring, proposed once. If another change wins, or
the store cannot be reached, the next one waits for its turn as well.

Invariants
- At most one proposal a minute; none for a vnode that the ring before gave to another node, so that one which
  is hot wherever it is does not go back and forth.

Threads: the IO thread.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cachemgr.cluster.background import Background
from cachemgr.cluster.contract import Membership, Peers, Rings
from cachemgr.cluster.control.trouble import ControlTrouble
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.errors import CacheError
from cachemgr.ring import NodeId, Ring, VnodeId, move_vnode, position_of

log = logging.getLogger(__name__)

SHARE = 0.8
"""Of what the node sends."""
FOR_S = 30.0
BUSY_BYTES_PER_S = 16 << 20
"""Below that nobody is in anybody's way."""
BETWEEN_MOVES_S = 60.0

_LOOK_S = 2.0


@dataclass(slots=True)
class VnodeReads:
    """What was read of a vnode since the last look."""

    blocks: int = 0
    nbytes: int = 0


class Balance:
    """`on_read` is told of everything that this node sends; `start` looks at it every other second."""

    def __init__(
        self,
        rings: Rings,
        peers: Peers,
        *,
        membership: Membership,
        settings: ClusterSettings,
        clock: Callable[[], float],
    ) -> None:
        self._rings = rings
        self._peers = peers
        self._membership = membership
        self._settings = settings
        self._clock = clock
        self._reads: dict[VnodeId, VnodeReads] = {}
        self._rates: dict[VnodeId, float] = {}
        self._looked_at = clock()
        self._hot: VnodeId | None = None
        self._hot_since = 0.0
        self._proposed_at = float("-inf")
        self._moves = 0
        self._lost_moves = 0
        self._background = Background("balance", self._look)

    def start(self) -> None:
        """Begin to look."""
        self._looked_at = self._clock()
        self._background.start()

    def on_read(self, segment: BlockHash, blocks: int, nbytes: int) -> None:
        """So many blocks and bytes of a segment were sent or read here."""
        vnode, _, _ = self._rings.ring.vnode_at(position_of(segment))
        reads = self._reads.get(vnode)
        if reads is None:
            reads = self._reads[vnode] = VnodeReads()
        reads.blocks += blocks
        reads.nbytes += nbytes

    @property
    def vnode_qps(self) -> dict[VnodeId, float]:
        """Blocks per second by vnode, between the last two looks; vnodes without reads are absent."""
        return dict(self._rates)

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`)."""
        return {
            "cluster_balance_moves_total": float(self._moves),
            "cluster_balance_lost_moves_total": float(self._lost_moves),
        }

    async def close(self) -> None:
        """Stop looking. Idempotent."""
        await self._background.close()

    async def _look(self) -> float:
        now = self._clock()
        took = now - self._looked_at
        if took <= 0:
            return _LOOK_S
        reads, self._reads, self._looked_at = self._reads, {}, now
        self._rates = {vnode: read.blocks / took for vnode, read in reads.items()}
        hot = self._hottest(reads, took)
        if hot is None or hot != self._hot:
            self._hot, self._hot_since = hot, now
        elif now - self._hot_since >= FOR_S and now - self._proposed_at >= BETWEEN_MOVES_S:
            await self._move(hot)
        return _LOOK_S

    def _hottest(self, reads: dict[VnodeId, VnodeReads], took: float) -> VnodeId | None:
        """The vnode with more than its share, if the policy is on, the node is busy, and it is our own."""
        total = sum(read.nbytes for read in reads.values())
        if not self._settings.balance or total < BUSY_BYTES_PER_S * took:
            return None
        vnode, read = max(reads.items(), key=lambda item: item[1].nbytes)
        ours = self._owner(self._rings.ring, vnode) == self._rings.node
        return vnode if ours and read.nbytes > SHARE * total else None

    async def _move(self, vnode: VnodeId) -> None:
        ring, previous = self._rings.ring, self._rings.previous
        target = self._least_loaded()
        moved_here = previous is not None and self._owner(previous, vnode) != self._rings.node
        if target is None or moved_here:
            return
        self._proposed_at = self._clock()
        try:
            async with asyncio.timeout(self._settings.call_s):
                moved = move_vnode(ring.state, vnode, target)
                won_by = await self._membership.publish(moved, replaces=ring.version)
        except (CacheError, ControlTrouble, OSError, TimeoutError) as trouble:
            log.warning("vnode %s is hot, and could not be moved to %s: %s", vnode, target, trouble)
            self._lost_moves += 1
            return
        if won_by is not None:
            self._lost_moves += 1
            return
        self._moves += 1
        log.info("vnode %s takes more than %d %% of what this node sends: moved to %s", vnode, 100 * SHARE,
        target)

    def _least_loaded(self) -> NodeId | None:
        """Of the others that can own vnodes and answer."""
        nodes = self._rings.ring.state.nodes
        draining = {node.id for node in nodes if node.draining}
        there = [peer for peer in self._peers.others() if peer.usable and peer.node not in draining]
        return min(there, key=lambda peer: (peer.load, peer.node)).node if there else None

    @staticmethod
    def _owner(ring: Ring, vnode: VnodeId) -> str:
        """The node that has a vnode; empty if there is no such vnode."""
        home = vnode.rpartition("#")[0]
        spec = ring.state.node(home)
        if spec is None or spec.draining:
            return ""
        target = ring.state.node(ring.state.overrides.get(vnode, home))
        return target.id if target is not None and not target.draining else home
