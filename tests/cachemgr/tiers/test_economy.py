"""The plan is the best of all, a tier is asked where that can pay, a fetch ends where it lost too much."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.tiers.economy import (
    AT_STAKE,
    TRIAL_STAKE,
    Allowance,
    Plan,
    Supply,
    Worth,
    plan,
    worth,
)
from cachemgr.tiers.fetch_cost import FetchCost, Price
from tests.cachemgr.host import Clock

SECONDS = st.floats(0, 10, allow_subnormal=False)


def seconds_of(
    steps: Sequence[tuple[int, int]], supplies: Sequence[Supply], ends: Sequence[int], block_s: float
) -> float:
    """What a plan takes, by its meaning."""
    fetch_s, here = 0.0, 0
    for at, blocks in steps:
        assert here < blocks <= supplies[at].blocks
        fetch_s += supplies[at].price.fetch_s(blocks - here)
        here = blocks
    return fetch_s + (ends[-1] - ends[here]) * block_s


def every_plan(supplies: Sequence[Supply]) -> list[list[tuple[int, int]]]:
    plans: list[list[tuple[int, int]]] = [[]]
    for blocks in range(1, max((supply.blocks for supply in supplies), default=0) + 1):
        for sources in itertools.product(range(len(supplies)), repeat=blocks):
            if all(row < supplies[at].blocks for row, at in enumerate(sources)):
                steps: list[tuple[int, int]] = []
                for row, at in enumerate(sources):
                    if steps and steps[-1][0] == at:
                        steps.pop()
                    steps.append((at, row + 1))
                plans.append(steps)
    return plans


@st.composite
def markets(draw: st.DrawFn) -> tuple[list[Supply], list[int], float]:
    wanted = draw(st.integers(1, 5))
    supplies = [
        Supply(Price(draw(SECONDS), draw(SECONDS), draw(SECONDS)), draw(st.integers(0, wanted)))
        for _ in range(draw(st.integers(0, 3)))
    ]
    here = [draw(st.integers(1, 3)) for _ in range(wanted)]
    return supplies, [0, *itertools.accumulate(here)], draw(SECONDS)


@given(markets())
def test_no_other_plan_is_quicker(market: tuple[list[Supply], list[int], float]) -> None:
    supplies, ends, block_s = market
    chosen = plan(supplies, ends, block_s=block_s)
    taken = seconds_of(chosen.steps, supplies, ends, block_s)
    assert taken == pytest.approx(chosen.seconds)
    best = min(seconds_of(steps, supplies, ends, block_s) for steps in every_plan(supplies))
    assert taken == pytest.approx(best)


@given(markets())
def test_without_an_economy_it_is_all_there_is(market: tuple[list[Supply], list[int], float]) -> None:
    supplies, ends, _ = market
    chosen = plan(supplies, ends, block_s=None)
    most = max((supply.blocks for supply in supplies), default=0)
    assert (chosen.steps[-1][1] if chosen.steps else 0) == most
    full = [steps for steps in every_plan(supplies) if (steps[-1][1] if steps else 0) == most]
    best = min(seconds_of(steps, supplies, ends, 0.0) for steps in full)
    assert seconds_of(chosen.steps, supplies, ends, 0.0) == pytest.approx(best)


def test_of_equals_the_earlier_tier_is_asked() -> None:
    same = Price(0.0, 0.001, 0.001)
    assert plan([Supply(same, 8), Supply(same, 8)], range(9), block_s=0.01).steps == ((0, 8),)


def test_of_equals_more_is_fetched() -> None:
    as_slow_as_computing = Price(0.0, 0.0, 1 / 64)
    assert plan([Supply(as_slow_as_computing, 8)], range(9), block_s=1 / 64).steps == ((0, 8),)


def test_a_part_from_each_where_that_is_best() -> None:
    quick, slow = Supply(Price(0, 0.001, 0.001), 4), Supply(Price(0, 0.001, 0.004), 8)
    assert plan([slow, quick], range(9), block_s=0.01).steps == ((1, 4), (0, 8))


def test_blocks_here_behind_a_gap_make_the_gap_worth_more() -> None:
    dear = [Supply(Price(0, 0.0, 0.03), 1)]
    assert plan(dear, [0, 1], block_s=0.01).steps == ()
    assert plan(dear, [0, 8], block_s=0.01).steps == ((0, 1),)


def test_a_long_prompt_is_planned() -> None:
    supplies = [Supply(Price(0, 0.001, 0.001), 4000), Supply(Price(0, 0.002, 0.0005), 4096)]
    assert plan(supplies, range(4097), block_s=0.01).steps == ((1, 4096),)
    assert isinstance(plan([], [0], block_s=0.01), Plan)


def measured(clock: Clock, *, ask_s: float = 0.001, first_s: float, block_s: float) -> FetchCost:
    cost = FetchCost(1 << 20, clock=clock)
    for _ in range(9):
        cost.answered(ask_s)
        cost.fetched(11, first_s=first_s, last_s=first_s + 10 * block_s)
    return cost


def test_a_tier_is_asked_where_it_is_quicker_than_computing() -> None:
    cost = measured(Clock(), first_s=0.005, block_s=0.002)
    assert worth(cost, 32, block_s=0.015) is Worth.PAYS
    assert worth(cost, 32, block_s=0.001) is Worth.DOES_NOT_PAY
    assert worth(cost, 32, block_s=0.0) is Worth.DOES_NOT_PAY
    assert worth(cost, 32, block_s=None) is Worth.PAYS


def test_nor_where_its_first_block_would_come_too_late() -> None:
    cost = measured(Clock(), first_s=0.02, block_s=0.001)
    assert worth(cost, 1000, block_s=0.01) is Worth.PAYS
    assert worth(cost, 10, block_s=0.01) is Worth.DOES_NOT_PAY


def test_a_slow_tier_is_tried_again_after_a_while() -> None:
    clock = Clock()
    cost = measured(clock, first_s=0.02, block_s=0.02)
    assert worth(cost, 32, block_s=0.015) is Worth.DOES_NOT_PAY
    clock.now += 60
    assert worth(cost, 32, block_s=0.015) is Worth.TRIAL


def allowed(*, deadline: float = 1000.0, block_s: float | None = 1.0) -> Allowance:
    return Allowance(100.0, deadline, 10, block_s)


LOST_S = 10 * AT_STAKE


def test_a_fetch_that_brings_nothing_is_cut_when_it_lost_its_stake() -> None:
    assert allowed().until() == pytest.approx(100 + LOST_S)


def test_what_came_prolongs_a_fetch() -> None:
    allowance = allowed()
    allowance.came(3, at=104.0)
    assert allowance.until() == pytest.approx(103 + LOST_S)
    allowance.came(4, at=104.5)
    assert allowance.until() == pytest.approx(104 + LOST_S)


def test_a_lead_is_not_lost_to_a_stall() -> None:
    allowance = allowed()
    allowance.came(8, at=100.0)
    assert allowance.until() == pytest.approx(102 + LOST_S)


def test_what_was_told_before_is_no_news() -> None:
    allowance = allowed()
    allowance.came(3, at=101.0)
    until = allowance.until()
    allowance.came(3, at=105.0)
    allowance.came(2, at=105.0)
    assert allowance.until() == until


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 3)), max_size=10), st.floats(0.01, 5))
def test_never_further_behind_than_the_stake(news: list[tuple[float, int]], block_s: float) -> None:
    allowance = allowed(block_s=block_s)
    now, saved = 100.0, 0
    for pause_s, blocks in news:
        now += pause_s
        if now >= allowance.until():
            break
        saved += blocks
        allowance.came(saved, at=now)
    behind = allowance.until() - 100.0 - saved * block_s
    assert behind <= AT_STAKE * 10 * block_s + 1e-9


def test_never_beyond_the_deadline() -> None:
    assert allowed(deadline=100.5).until() == 100.5
    assert allowed(deadline=100.5, block_s=None).until() == 100.5
    assert allowed(block_s=0.0).until() == 100.0


def test_a_part_may_lose_less_and_never_more_than_the_whole() -> None:
    whole = allowed()
    trial = whole.part(TRIAL_STAKE, now=100.1)
    assert trial.until() == pytest.approx(100.3)
    trial.came(2, at=100.2)
    assert trial.until() == pytest.approx(100 + LOST_S)
    whole.came(2, at=100.2)
    assert trial.until() == pytest.approx(100.2 + 1.9 / 4 + 0.2)
    assert whole.part(TRIAL_STAKE, now=110.0).until() == whole.until()
