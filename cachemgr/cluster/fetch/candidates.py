"""Whom to ask for a segment, one after the other.

First the owners of the ring in force, with the extra owners of a segment that is known to be hot, in an
order that spreads reads by load; then the owners of the rings before, while there are any. Never ourselves,
and nobody who is not usable when his turn comes. Who left a read without an answer just now comes after the
others of his kind: it takes a breaker several troubles to open, and a read has several segments.

Load is compared with the power of two choices: of two random ones the less loaded (Mitzenmacher, "The Power
of Two Choices in Randomized Load Balancing", 2001). Loads within a factor of two count as equal: they are
measured latencies, and readers that all follow the same noise overload whoever seemed faster.

Threads: the IO loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from cachemgr.cluster.contract import Peer, Peers, Rings
from cachemgr.cluster.fetch.hot_keys import HotHints
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId, position_of

_EQUAL = 2.0
_AVOIDED_S = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One to ask; `owner`: by the ring in force it should have the segment."""

    peer: Peer
    owner: bool


class Candidates:
    """Orders them anew for every segment and read."""

    def __init__(
        self, rings: Rings, peers: Peers, *, hints: HotHints, clock: Callable[[], float], random: Random
    ) -> None:
        self._rings = rings
        self._peers = peers
        self._hints = hints
        self._clock = clock
        self._random = random
        self._avoided: dict[NodeId, float] = {}
        """Until when; at most one entry per node."""

    def avoid(self, node: NodeId) -> None:
        """It did not answer: ask others first for a while."""
        self._avoided[node] = self._clock() + _AVOIDED_S

    def of(self, segment: BlockHash) -> Iterator[Candidate]:
        """Each at most once; loads are compared, and who is usable is asked, as late as possible."""
        ring, earlier = self._rings.ring, self._rings.earlier
        position = position_of(segment)
        nodes = dict.fromkeys(ring.owners(position, 1 + ring.replicas) + self._hints.extra(ring, segment))
        pool = [peer for node in nodes if (peer := self._other(node)) is not None]
        while pool:
            yield Candidate(self._next(pool), owner=True)
            pool = [peer for peer in pool if peer.usable]
        for before in earlier:
            for node in before.owners(position, 1 + before.replicas):
                if node not in nodes and (peer := self._other(node)) is not None:
                    nodes[node] = None
                    yield Candidate(peer, owner=False)

    def several(self) -> bool:
        """Is there more than one node to ask at all?"""
        return sum(peer.usable for peer in self._peers.others()) > 1

    def _other(self, node: NodeId) -> Peer | None:
        """A usable peer; None if it is not, or if it is us."""
        peer = self._peers.peer(node)
        return peer if peer is not None and peer.usable else None

    def _next(self, pool: list[Peer]) -> Peer:
        """Take the less loaded of two random ones out of the pool."""
        good = pool
        if self._avoided:
            now = self._clock()
            good = [peer for peer in pool if now >= self._avoided.get(peer.node, now)] or pool
        chosen = self._random.randrange(len(good))
        if len(good) > 1:
            other = (chosen + 1 + self._random.randrange(len(good) - 1)) % len(good)
            if good[chosen].load > _EQUAL * good[other].load:
                chosen = other
        peer = good[chosen]
        pool.remove(peer)
        return peer
