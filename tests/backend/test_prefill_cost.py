"""The estimate of what computing a prompt takes, and the time that a fetch gets by it."""

import pytest

from backend.prefill_cost import FIRST_GUESS_TOKENS_PER_S, PrefillCost
from tests.backend.doubles import BLOCK, Rig


def test_guess_before_anything_was_measured() -> None:
    assert PrefillCost().seconds(1000) == pytest.approx(1000 / FIRST_GUESS_TOKENS_PER_S)


def test_one_slow_step_does_not_move_the_estimate() -> None:
    cost = PrefillCost()
    for _ in range(5):
        cost.observe(128, 0.128)
    cost.observe(128, 12.8)
    assert cost.seconds(1000) == pytest.approx(1.0)


def test_follows_an_engine_that_became_slower() -> None:
    cost = PrefillCost()
    for _ in range(100):
        cost.observe(128, 0.128)
    for _ in range(33):
        cost.observe(128, 0.256)
    assert cost.seconds(1000) == pytest.approx(2.0)


def test_short_prefills_are_left_out() -> None:
    cost = PrefillCost()
    cost.observe(2, 1.0)
    assert cost.seconds(1000) == pytest.approx(1000 / FIRST_GUESS_TOKENS_PER_S)


def test_a_fetch_gets_the_time_that_computing_would_take() -> None:
    rig = Rig()
    rig.now = 50.0
    for _ in range(3):
        rig.cost.observe(100, 25.0)
    rig.ask(range(2 * BLOCK))
    rig.run()
    assert rig.cache.deadlines == [pytest.approx(50.0 + 2 * BLOCK * 0.25)]


def test_what_is_here_already_needs_no_time() -> None:
    rig = Rig()
    for _ in range(3):
        rig.cost.observe(100, 25.0)
    rig.ask(range(2 * BLOCK), max_tokens=1)
    rig.run()
    rig.ask(range(3 * BLOCK), max_tokens=1)
    rig.run()
    assert rig.cache.deadlines[-1] == pytest.approx(BLOCK * 0.25)


def test_and_no_more_than_the_request_has() -> None:
    rig = Rig()
    rig.ask(range(2 * BLOCK), deadline=0.001)
    rig.step()
    assert rig.cache.deadlines == [0.001]


def test_prefills_are_measured() -> None:
    rig = Rig()
    before = rig.cost.seconds(1)
    prefill = rig.engine.prefill

    def slow(lane, tokens, start):
        rig.now += 10.0 * len(tokens)
        return prefill(lane, tokens, start)

    rig.engine.prefill = slow
    rig.ask(range(33), cached=False)
    rig.run()
    assert rig.cost.seconds(1) == pytest.approx(10.0) != before
