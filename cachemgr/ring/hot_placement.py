"""Who has copies of a hot segment beside its owners: the same answer on every node, from the ring alone."""

from cachemgr.contract import BlockHash
from cachemgr.ring.names import NodeId, position_of
from cachemgr.ring.points import rehashed
from cachemgr.ring.ring import Ring

_TURNS = 256


def extra_owners(ring: Ring, segment: BlockHash, k: int) -> tuple[NodeId, ...]:
    """The first `k` extra owners of a segment, none of its owners; fewer if there are not as many nodes.

    Extra owner by extra owner, the segment's hash gets another suffix, and the primary of that position is
    taken: so hot segments of one owner spread over all nodes. More extra owners begin with fewer.
    """
    position = position_of(segment)
    base = ring.owners(position, 1 + ring.replicas)
    k = min(k, ring.placed - len(base))
    found: dict[NodeId, None] = {}
    for turn in range(1, _TURNS + 1):
        if len(found) >= k:
            return tuple(found)[:k]
        node = ring.owners(rehashed(segment, turn), 1)[0]
        if node not in base:
            found[node] = None
    for node in ring.owners(position, ring.placed):  # nodes so light that no turn met them
        if node not in base:
            found[node] = None
    return tuple(found)[:k]
