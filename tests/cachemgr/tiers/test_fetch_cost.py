"""What a tier is expected to take: robust, forgetting, and never without an answer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.tiers.fetch_cost import HALF_LIFE_S, FadingMedian, FetchCost, FetchCosts
from tests.cachemgr.host import Clock

NBYTES = 1 << 20


def measure(cost: FetchCost, *, times: int = 3, ask_s: float, first_s: float, block_s: float) -> None:
    for _ in range(times):
        cost.answered(ask_s)
        cost.fetched(11, first_s=first_s, last_s=first_s + 10 * block_s)


def test_before_the_first_sample_every_tier_is_worth_a_try() -> None:
    price = FetchCost(NBYTES, clock=Clock()).measured
    assert 0 < price.ask_s + price.fetch_s(32) < 0.02


def test_a_guess_grows_with_the_size_of_a_block() -> None:
    small, big = FetchCost(4096, clock=Clock()), FetchCost(64 << 20, clock=Clock())
    assert small.measured.block_s < big.measured.block_s


def test_it_is_what_it_was_lately() -> None:
    cost = FetchCost(NBYTES, clock=Clock())
    measure(cost, ask_s=0.001, first_s=0.005, block_s=0.002)
    assert cost.measured.ask_s == pytest.approx(0.001)
    assert cost.measured.fetch_s(1) == pytest.approx(0.005)
    assert cost.measured.fetch_s(101) == pytest.approx(0.205)
    measure(cost, times=9, ask_s=0.01, first_s=0.05, block_s=0.02)
    assert cost.measured.fetch_s(101) == pytest.approx(2.05)


def test_no_blocks_cost_nothing() -> None:
    assert FetchCost(NBYTES, clock=Clock()).measured.fetch_s(0) == 0


@pytest.mark.parametrize("before", [0, 1, 4, 9, 20])
def test_one_outlier_moves_little(before: int) -> None:
    cost = FetchCost(NBYTES, clock=Clock())
    measure(cost, times=before, ask_s=0.001, first_s=0.002, block_s=0.001)
    usual = cost.measured.fetch_s(32)
    measure(cost, times=1, ask_s=60.0, first_s=60.0, block_s=60.0)
    assert cost.measured.fetch_s(32) <= max(2 * usual, 0.04)


def test_what_was_cut_counts_as_longer_than_it_had_taken() -> None:
    cost = FetchCost(NBYTES, clock=Clock())
    for _ in range(3):
        cost.silent(0.05)
    assert cost.measured.ask_s >= 0.05
    assert cost.measured.fetch_s(10) >= 0.5


def test_a_short_wait_says_nothing_against_what_is_known() -> None:
    cost = FetchCost(NBYTES, clock=Clock())
    measure(cost, times=5, ask_s=0.1, first_s=0.1, block_s=0.1)
    for _ in range(20):
        cost.silent(0.001)
        cost.slow(0.001, blocks=3)
    assert cost.measured.fetch_s(10) == pytest.approx(1.0)


def test_trials_that_are_cut_do_not_bring_back_what_was_forgiven() -> None:
    clock = Clock()
    cost = FetchCost(NBYTES, clock=clock)
    measure(cost, times=9, ask_s=1.0, first_s=1.0, block_s=1.0)
    for _ in range(5):
        clock.now += 10 * HALF_LIFE_S
        cost.silent(0.01)
    assert 0.02 <= cost.measured.ask_s <= 0.03


def test_a_slow_tier_is_forgiven_with_time() -> None:
    clock = Clock()
    cost = FetchCost(NBYTES, clock=clock)
    measure(cost, times=9, ask_s=0.1, first_s=1.0, block_s=1.0)
    clock.now += HALF_LIFE_S
    assert cost.expected.fetch_s(10) == pytest.approx(5.0, rel=0.01)
    clock.now += 100 * HALF_LIFE_S
    guess = FetchCost(NBYTES, clock=clock).expected
    assert cost.expected.fetch_s(10) == pytest.approx(guess.fetch_s(10))
    assert cost.measured.fetch_s(10) == pytest.approx(10.0)


def test_a_fast_tier_is_not_made_slower_by_time() -> None:
    clock = Clock()
    cost = FetchCost(NBYTES, clock=clock)
    measure(cost, times=9, ask_s=1e-6, first_s=1e-6, block_s=1e-6)
    clock.now += 1000
    assert cost.expected == cost.measured


@given(
    st.lists(
        st.tuples(st.sampled_from(["answered", "fetched", "all", "silent", "slow"]), st.floats(0, 1e6)),
        max_size=40,
    ),
    st.integers(0, 3),
    st.floats(0, 1e9),
)
def test_it_always_has_an_answer(samples: list[tuple[str, float]], blocks: int, later: float) -> None:
    clock = Clock()
    cost = FetchCost(NBYTES, clock=clock)
    for kind, seconds in samples:
        match kind:
            case "answered":
                cost.answered(seconds)
            case "fetched":
                cost.fetched(blocks, first_s=seconds, last_s=seconds)
            case "all":
                cost.fetched_all(blocks, seconds=seconds)
            case "silent":
                cost.silent(seconds)
            case "slow":
                cost.slow(seconds, blocks=blocks)
    clock.now += later
    for price in (cost.measured, cost.expected):
        assert all(math.isfinite(value) and value >= 0 for value in (price.ask_s, price.fetch_s(32)))
    assert cost.expected.ask_s <= cost.measured.ask_s


def test_a_clock_that_stands_still_is_no_division_by_zero() -> None:
    median = FadingMedian(0.1, clock=Clock())
    median.note(0.0)
    assert median.expected <= 0.1


def test_tiers_and_sizes_are_apart_and_bounded() -> None:
    costs = FetchCosts(clock=Clock())
    redis = costs.of("redis", NBYTES)
    measure(redis, ask_s=1.0, first_s=1.0, block_s=1.0)
    assert costs.of("redis", NBYTES) is redis
    assert costs.of("lmdb", NBYTES).measured.fetch_s(9) < 1
    assert costs.of("redis", NBYTES // 2).measured.fetch_s(9) < 1
    for size in range(1000):
        costs.of("redis", size)
    assert costs.of("redis", NBYTES) is not redis
