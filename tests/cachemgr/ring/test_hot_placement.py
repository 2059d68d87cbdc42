"""Extra owners of hot segments: distinct, not owners already, the same everywhere, spread."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.contract import BlockHash
from cachemgr.ring import Ring, RingState, add_node, extra_owners, position_of
from tests.cachemgr.ring.rings import ring_of, spec, states

HASHES = st.binary(min_size=16, max_size=16).map(BlockHash)


@settings(max_examples=100)
@given(states(), HASHES)
def test_distinct_and_no_owners(state: RingState, segment: BlockHash) -> None:
    ring = Ring(state)
    owners = ring.owners(position_of(segment), 1 + ring.replicas)
    every = extra_owners(ring, segment, 100)
    assert set(every) | set(owners) == set(ring.owners(0, 100))
    assert len(every) + len(owners) == len(ring.owners(0, 100))
    assert ring.placed == len(every) + len(owners)
    for k in range(len(every) + 1):
        assert extra_owners(Ring(state), segment, k) == every[:k]


def test_segments_of_one_owner_spread_over_all_others() -> None:
    ring = ring_of([spec(f"n{number}") for number in range(8)], replicas=0)
    hot = [number.to_bytes(8, "big").rjust(16, b"\0") for number in range(2000)]  # all at position 0
    extra = Counter(extra_owners(ring, BlockHash(segment), 1)[0] for segment in hot)
    assert len(extra) == 7
    assert max(extra.values()) <= 1.5 * 2000 / 7


def test_a_new_node_takes_its_share_of_extra_copies_and_the_others_keep_theirs() -> None:
    ring = ring_of([spec(f"n{number}") for number in range(8)])
    grown = Ring(add_node(ring.state, spec("new")))
    segments = [BlockHash(number.to_bytes(16, "little")) for number in range(0, 1 << 62, 1 << 53)]
    kept = other = 0
    for segment in segments:
        if "new" in grown.owners(position_of(segment), 2):
            continue
        before, after = extra_owners(ring, segment, 2), extra_owners(grown, segment, 2)
        kept += before == after
        other += not set(after) - set(before) <= {"new"}  # where it took two turns of a segment
    assert kept >= len(segments) / 2
    assert other <= len(segments) / 20
