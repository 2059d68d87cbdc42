"""Rings for tests: built by hand, or drawn by hypothesis."""

from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from cachemgr.ring import NodeSpec, Ring, RingState, first_state, vnode_id

TOP = (1 << 64) - 1
RING = 1 << 64


def spec(name: str, *, domain: str = "", weight: float = 1.0, draining: bool = False) -> NodeSpec:
    return NodeSpec(name, f"{name}.example:7400", domain, weight, draining)


def ring_of(nodes: Iterable[NodeSpec], *, replicas: int = 1) -> Ring:
    return Ring(first_state(nodes, replicas=replicas))


def share(ring: Ring, node: str) -> float:
    """Of all positions, how many have `node` as their primary."""
    return length(*ring.arcs(node, 1)) / RING


def length(low: np.ndarray, high: np.ndarray) -> int:
    return sum(int(end) - int(start) + 1 for start, end in zip(low, high, strict=True))


def node_names() -> st.SearchStrategy[str]:
    return st.text("abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1, max_size=12)


def positions() -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([0, 1, TOP - 1, TOP]), st.integers(0, TOP))


@st.composite
def states(draw: st.DrawFn, *, max_nodes: int = 9) -> RingState:
    """Few vnodes a node, domains that may be rare or shared, nodes that drain, vnodes that were moved."""
    names = draw(st.lists(node_names(), min_size=1, max_size=max_nodes, unique=True))
    nodes = [
        spec(
            name,
            domain=draw(st.sampled_from(["", "", "rack-a", "rack-b", "rack-c"])),
            weight=draw(st.sampled_from([0.001, 0.01, 0.05, 0.1])),
            draining=draw(st.integers(0, 5)) == 0 and index > 0,
        )
        for index, name in enumerate(names)
    ]
    state = first_state(nodes, replicas=draw(st.integers(0, 3)))
    overrides = {}
    if len(nodes) > 1:
        for _ in range(draw(st.integers(0, 6))):
            home = draw(st.sampled_from(nodes))
            vnode = vnode_id(home.id, draw(st.integers(0, max(home.vnodes, 1) - 1)))
            overrides[vnode] = draw(st.sampled_from([name for name in names if name != home.id]))
    return RingState(draw(st.integers(1, 1 << 62)), state.nodes, overrides, state.replicas)
