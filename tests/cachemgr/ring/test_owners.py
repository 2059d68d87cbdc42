"""Who owns a position, and which positions a node owns: the same whichever way one asks."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.ring import Ring, RingState, encode_ring, first_state
from tests.cachemgr.ring import reference
from tests.cachemgr.ring.rings import TOP, length, positions, ring_of, spec, states


def edges(ring: Ring) -> list[int]:
    """Positions on and beside every point, and both ends of the ring."""
    points = {ring.vnode_at(0)[1]}
    at = 0
    while (point := ring.vnode_at(at)[1]) not in points or at == 0:
        points.add(point)
        at = (point + 1) & TOP
    return sorted({0, TOP} | {(point + beside) & TOP for point in points for beside in (-1, 0, 1)})


@settings(max_examples=150)
@given(state=states(), position=positions(), n=st.integers(0, 12))
def test_owners_are_those_of_the_other_implementation(state: RingState, position: int, n: int) -> None:
    plain = json.loads(encode_ring(state))
    assert reference.encoded(plain) == encode_ring(state).decode()
    wanted = reference.owners(plain, reference.placed(plain), position, n)
    assert list(Ring(state).owners(position, n)) == wanted


@settings(max_examples=150)
@given(state=states(), position=positions())
def test_owners_are_ordered_distinct_and_apart_while_possible(state: RingState, position: int) -> None:
    ring = Ring(state)
    every = ring.owners(position, 100)
    assert len(set(every)) == len(every)
    for n in range(len(every) + 1):
        assert ring.owners(position, n) == every[:n]
    domains = {node.id: node.failure_domain for node in state.nodes}
    apart = len({domains[node] for node in every})
    assert len({domains[node] for node in every[:apart]}) == apart
    assert every[:1] == ring.vnode_at(position)[2:]
    assert not {node.id for node in state.nodes if node.draining} & set(every)


@settings(max_examples=60)
@given(state=states(max_nodes=6), n=st.integers(0, 7))
def test_arcs_and_owned_agree_with_owners(state: RingState, n: int) -> None:
    ring = Ring(state)
    asked = edges(ring)
    array = np.array(asked, np.uint64)
    everywhere = 0
    for node in [*(node.id for node in state.nodes), "stranger"]:
        wanted = [node in ring.owners(position, n) for position in asked]
        assert ring.owned(array, node, n).tolist() == wanted
        low, high = ring.arcs(node, n)
        assert low.dtype == high.dtype == np.uint64
        assert (low <= high).all()
        assert all(int(end) + 1 < int(start) for start, end in zip(low[1:], high[:-1], strict=True))
        arcs = list(zip(low.tolist(), high.tolist(), strict=True))
        inside = [any(start <= position <= end for start, end in arcs) for position in asked]
        assert inside == wanted
        everywhere += length(low, high)
    assert everywhere == len(ring.owners(0, n)) << 64


def test_one_node_has_the_whole_ring_in_one_arc() -> None:
    low, high = ring_of([spec("only")]).arcs("only", 2)
    assert (low.tolist(), high.tolist()) == ([0], [TOP])


def test_nothing_is_owned_where_nothing_is_asked() -> None:
    ring = ring_of([spec("a"), spec("b")])
    assert ring.owned(np.array([], np.uint64), "a", 1).tolist() == []
    assert [len(side) for side in ring.arcs("a", 0)] == [0, 0]


def at_points(points: dict[str, list[int]], **domains: str) -> Ring:
    """A ring whose nodes have two vnodes each, where the test wants them."""
    nodes = [spec(name, domain=domains.get(name, ""), weight=2 / 128) for name in points]
    return Ring(
        first_state(nodes, replicas=1), points=lambda node, count: np.array(points[node][:count], np.uint64)
    )


def test_colliding_points_survive() -> None:
    """Equal points lie there in the order of node ids: the first has the positions, the others come next."""
    ring = at_points({"b": [100, 500], "a": [100, 300], "c": [100, 700]})
    assert ring.owners(50, 3) == ("a", "b", "c")
    assert ring.owners(100, 3) == ("a", "b", "c")
    assert ring.owners(101, 3) == ("a", "b", "c")
    assert ring.owners(301, 3) == ("b", "c", "a")
    assert ring.vnode_at(60) == ("a#0", 100, "a")
    assert [side.tolist() for side in ring.arcs("b", 1)] == [[301], [500]]
    assert [side.tolist() for side in ring.arcs("b", 2)] == [[0, 701], [500, TOP]]


def test_all_points_equal() -> None:
    ring = at_points({"a": [7, 7], "b": [7, 7]})
    assert ring.owners(0, 2) == ring.owners(7, 2) == ring.owners(8, 2) == ("a", "b")
    assert [side.tolist() for side in ring.arcs("a", 1)] == [[0], [TOP]]
    assert [len(side) for side in ring.arcs("b", 1)] == [0, 0]


def test_points_at_both_ends_of_the_ring() -> None:
    ring = at_points({"a": [0, 900], "b": [TOP, 400]})
    assert ring.owners(0, 1) == ("a",)
    assert ring.owners(1, 1) == ("b",)
    assert ring.owners(901, 1) == ring.owners(TOP, 1) == ("b",)
    assert [side.tolist() for side in ring.arcs("a", 1)] == [[0, 401], [0, 900]]
    assert [side.tolist() for side in ring.arcs("b", 1)] == [[1, 901], [400, TOP]]


def test_last_stretch_wraps_to_the_first_vnode() -> None:
    ring = at_points({"a": [10, 20], "b": [30, 40]})
    assert ring.owners(41, 2) == ring.owners(TOP, 2) == ring.owners(0, 2) == ("a", "b")
    assert ring.vnode_at(TOP) == ("a#0", 10, "a")
    assert [side.tolist() for side in ring.arcs("a", 1)] == [[0, 41], [20, TOP]]


def test_a_rare_domain_is_found_around_the_whole_ring() -> None:
    """One vnode of the other domain among hundreds: it is the second owner of every other position."""
    big = [spec(f"n-{number}", domain="big") for number in range(8)]
    ring = ring_of([*big, spec("far", domain="rare", weight=0.001)])
    found = [ring.owners(position, 2) for position in range(0, TOP, TOP // 500)]
    assert all("far" in owners for owners in found)
    assert sum(owners[1] == "far" for owners in found) > 450
