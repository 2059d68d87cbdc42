"""Changes of a ring: each takes a state and gives the next one, an epoch later, or raises RingError.

Which of two changes of the same state wins is not decided here: see `Membership.publish`.
"""

import msgspec

from cachemgr.ring.errors import RingError
from cachemgr.ring.points import vnode_count
from cachemgr.ring.state import NodeSpec, RingState, home_of


def add_node(state: RingState, node: NodeSpec) -> RingState:
    """A node joins; one that was draining may come back, with what `node` says of it now."""
    there = state.node(node.id)
    if there is not None and not there.draining:
        raise RingError("node", "must not be in the ring already", node.id)
    return _next(state, nodes=(*(other for other in state.nodes if other.id != node.id), node))


def remove_node(state: RingState, node_id: str) -> RingState:
    """A node leaves at once, and every override that names it or a vnode of it."""
    _known(state, node_id)
    nodes = tuple(node for node in state.nodes if node.id != node_id)
    return _next(state, nodes=nodes, overrides=_without(state, node_id))


def drain_node(state: RingState, node_id: str) -> RingState:
    """A node gives all its vnodes away; it stays in the ring until it is removed."""
    if _known(state, node_id).draining:
        raise RingError("node", "must not be draining already", node_id)
    nodes = tuple(
        msgspec.structs.replace(node, draining=True) if node.id == node_id else node for node in state.nodes
    )
    return _next(state, nodes=nodes, overrides=_without(state, node_id))


def move_vnode(state: RingState, vnode: str, node_id: str) -> RingState:
    """A vnode goes to a node; to its home, if that is the one it is named after."""
    home = home_of(vnode)
    spec = _known(state, home)
    number = int(vnode.rpartition("#")[2])
    if spec.draining or number >= vnode_count(spec.weight):
        raise RingError("vnode", f"must be one of the {spec.vnodes} of {home}", vnode)
    if _known(state, node_id).draining:
        raise RingError("node", "must not be draining", node_id)
    if state.overrides.get(vnode, home) == node_id:
        raise RingError("node", f"must not be the one that has {vnode} now", node_id)
    overrides = {name: target for name, target in state.overrides.items() if name != vnode}
    if node_id != home:
        overrides[vnode] = node_id
    return _next(state, overrides=overrides)


def set_replicas(state: RingState, replicas: int) -> RingState:
    """Another number of copies beside the primary."""
    if replicas == state.replicas:
        raise RingError("replicas", "must differ from what it is", replicas)
    return _next(state, replicas=replicas)


def _next(
    state: RingState,
    *,
    nodes: tuple[NodeSpec, ...] | None = None,
    overrides: dict[str, str] | None = None,
    replicas: int | None = None,
) -> RingState:
    return RingState(
        state.epoch + 1,
        state.nodes if nodes is None else tuple(sorted(nodes, key=lambda node: node.id)),
        state.overrides if overrides is None else overrides,
        state.replicas if replicas is None else replicas,
    )


def _known(state: RingState, node_id: str) -> NodeSpec:
    node = state.node(node_id)
    if node is None:
        raise RingError("node", "must be in the ring", node_id)
    return node


def _without(state: RingState, node_id: str) -> dict[str, str]:
    """The overrides that have nothing to do with a node."""
    return {
        vnode: target for vnode, target in state.overrides.items() if node_id not in (target, home_of(vnode))
    }
