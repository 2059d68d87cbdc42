"""Sets of positions behave as sets, at the ends of the ring too."""

from hypothesis import given
from hypothesis import strategies as st

from cachemgr.cluster.moves.arcs import SLICES, TOP, WHOLE, ArcSet, arcs_of, owned_arcs, split_at_vnodes
from cachemgr.ring import Ring, first_state, move_vnode
from tests.cachemgr.cluster.moves.cluster import spec

_ENDS = st.one_of(st.integers(0, 40), st.integers(TOP - 40, TOP))
_PAIRS = st.lists(st.tuples(_ENDS, _ENDS).map(lambda ends: (min(ends), max(ends))), max_size=8)
_NEAR = [*range(42), *range(TOP - 41, TOP + 1)]
"""Every position at which sets of `_PAIRS` can begin, end or touch."""


def _members(arcs: ArcSet) -> set[int]:
    assert all(low <= high for low, high in arcs.pairs)
    assert all(a[1] + 1 < b[0] for a, b in zip(arcs.pairs, arcs.pairs[1:], strict=False))
    return {position for position in _NEAR if position in arcs}


@given(_PAIRS, _PAIRS)
def test_operations_are_those_of_sets(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = arcs_of(first), arcs_of(second)
    assert _members(a) == {n for n in _NEAR if any(low <= n <= high for low, high in first)}
    assert _members(a | b) == _members(a) | _members(b)
    assert _members(a - b) == _members(a) - _members(b)
    assert _members(a & b) == _members(a) & _members(b)
    assert (a - b) | (a & b) == a


@given(_PAIRS)
def test_arrays_and_parts_have_every_arc(pairs: list[tuple[int, int]]) -> None:
    arcs = arcs_of(pairs)
    low, high = arcs.arrays()
    assert tuple(zip(low.tolist(), high.tolist(), strict=True)) == arcs.pairs
    assert [pair for part in arcs.parts(3) for pair in part.pairs] == list(arcs.pairs)


def test_slices_are_the_whole_ring() -> None:
    assert arcs_of(pair for part in SLICES for pair in part.pairs) == WHOLE


def test_owned_arcs_are_what_the_ring_gives() -> None:
    ring = Ring(first_state([spec(name) for name in "abc"], replicas=1))
    arcs = {name: owned_arcs(ring, name) for name in "abc"}  # type: ignore[arg-type]
    for position in (0, 1, TOP, *(n * (TOP // 997) for n in range(997))):
        assert {name for name in "abc" if position in arcs[name]} == set(ring.owners(position, 2))
    assert not owned_arcs(ring, "nobody")  # type: ignore[arg-type]


def test_within_a_part_no_ring_changes_its_owners() -> None:
    before = first_state([spec(name) for name in "abc"], replicas=1)
    rings = [Ring(before), Ring(move_vnode(before, "a#3", "b"))]
    parts = list(split_at_vnodes(WHOLE, rings))
    assert arcs_of(parts) == WHOLE
    assert len(parts) <= 25  # eight vnodes each, and what lies above the last point
    for low, high in parts:
        for ring in rings:
            at_ends = {ring.owners(position, 3) for position in (low, (low + high) // 2, high)}
            assert len(at_ends) == 1
