"""Lanes are handed out lowest first; retained KV is spared only where that costs nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.contract import EngineSpec, Geometry, LaneId
from engines.lanes import LanePool


def pool(lanes: int = 4, max_seq_len: int = 100) -> LanePool:
    geometry = Geometry(layers=1, hidden=8, query_heads=1, kv_heads=1, head_dim=8, vocab_size=8)
    return LanePool(
        EngineSpec(
            model="m", release=1, digest="d", kv_identity=bytes(16), geometry=geometry,
            kv_dtype=np.dtype("float32"), block_tokens=8, lanes=lanes, max_seq_len=max_seq_len, positions=104,
            max_prefill_tokens=32, exact=True,
        )
    )  # fmt: skip


def test_lowest_free_lane_first() -> None:
    lanes = pool()
    assert [lanes.reserve(1) for _ in range(5)] == [0, 1, 2, 3, None]
    assert (lanes.free, lanes.active) == (0, 4)
    lanes.release(LaneId(2))
    lanes.release(LaneId(1))
    assert lanes.reserve(1) == 1


@pytest.mark.parametrize(("tokens", "lane"), [(100, 0), (101, None)])
def test_a_lane_must_be_long_enough(tokens: int, lane: int | None) -> None:
    assert pool().reserve(tokens) == lane


def test_retained_lanes_are_spared_below_the_highest_active_lane() -> None:
    lanes = pool()
    for _ in range(4):
        lanes.reserve(1)
    lanes.release(LaneId(0), retain=True)
    lanes.release(LaneId(1))
    assert lanes.retained == {0}
    assert lanes.reserve(1) == 1, "lane 3 is active, so lane 1 costs no more than lane 0"
    assert lanes.reserve(1) == 0, "a retained lane is still a free one"
    assert lanes.retained == frozenset()


def test_a_retained_lane_is_taken_before_a_step_gets_longer() -> None:
    lanes = pool()
    assert lanes.reserve(1) == 0
    lanes.release(LaneId(0), retain=True)
    assert lanes.reserve(1) == 0, "lane 1 would make every decode span two rows"


def test_the_preferred_lane_is_taken_if_it_is_free() -> None:
    lanes = pool()
    for _ in range(3):
        lanes.reserve(1)
    lanes.release(LaneId(2), retain=True)
    lanes.release(LaneId(0))
    assert lanes.reserve(1, prefer=LaneId(2)) == 2
    assert lanes.reserve(1, prefer=LaneId(2)) == 0, "it is not free any more"


def test_a_lane_beyond_the_next_one_widens_decode_steps() -> None:
    lanes = pool(lanes=5)
    assert not any(lanes.widens(LaneId(lane)) for lane in range(5)), "nobody decodes"
    for _ in range(3):
        lanes.reserve(1)
    lanes.release(LaneId(0))
    lanes.release(LaneId(2))
    assert [lanes.widens(LaneId(lane)) for lane in (0, 2, 3, 4)] == [False, False, True, True]


def test_forgotten_lanes_are_plain_free_lanes() -> None:
    lanes = pool()
    for _ in range(3):
        lanes.reserve(1)
    lanes.release(LaneId(0), retain=True)
    lanes.release(LaneId(1))
    lanes.forget(LaneId(0))
    assert lanes.reserve(1) == 0


@pytest.mark.parametrize("lane", [-1, 0, 4])
def test_releasing_what_was_not_reserved_is_a_bug(lane: int) -> None:
    with pytest.raises(AssertionError):
        pool().release(LaneId(lane))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_active_and_free_lanes_are_always_all_lanes(moves: list[tuple[int, bool]]) -> None:
    lanes, active = pool(), set[LaneId]()
    for number, retain in moves:
        lane = LaneId(number)
        if lane in active:
            lanes.release(lane, retain=retain)
            active.remove(lane)
        else:
            taken = lanes.reserve(1, prefer=lane)
            assert taken == lane
            active.add(taken)
        assert (lanes.active, lanes.free) == (len(active), 4 - len(active))
        assert not lanes.retained & active
