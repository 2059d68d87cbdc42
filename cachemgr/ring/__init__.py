"""The ring: which node owns which segment, the same answer on every node that has the same ring.

    names          NodeId, VnodeId, Epoch, Version; the position of a segment
    points         where vnodes lie;  alone speaks to mmh3
    state          the ring as it is agreed on, sent and stored; its limits and canonical encoding
    changes        add, remove, drain, move, replicas: a state → the state of the next epoch
    ring           a state made ready for look-ups;  `owner_table` its owners, precomputed
    hot_placement  extra owners of hot segments
    crowded        the warning that one failure domain holds too much
    ring_file      what a node remembers over a restart
    errors         the refusals

Nothing here opens a socket or waits. Safety never depends on the ring: nodes that disagree miss blocks.
"""

from cachemgr.ring.changes import add_node, drain_node, move_vnode, remove_node, set_replicas
from cachemgr.ring.crowded import crowded_domain
from cachemgr.ring.errors import RingConflict, RingError
from cachemgr.ring.hot_placement import extra_owners
from cachemgr.ring.names import Epoch, NodeId, Version, VnodeId, position_of, vnode_id
from cachemgr.ring.points import vnode_count
from cachemgr.ring.ring import Arcs, Ring
from cachemgr.ring.ring_file import MAX_EARLIER, KeptRings, ReplacedRing, RingFile
from cachemgr.ring.state import NodeSpec, RingState, decode_ring, encode_ring, first_state, home_of

__all__ = [
    "MAX_EARLIER",
    "Arcs",
    "Epoch",
    "KeptRings",
    "NodeId",
    "NodeSpec",
    "ReplacedRing",
    "Ring",
    "RingConflict",
    "RingError",
    "RingFile",
    "RingState",
    "Version",
    "VnodeId",
    "add_node",
    "crowded_domain",
    "decode_ring",
    "drain_node",
    "encode_ring",
    "extra_owners",
    "first_state",
    "home_of",
    "move_vnode",
    "position_of",
    "remove_node",
    "set_replicas",
    "vnode_count",
    "vnode_id",
]
