"""The breaker of a peer: when it opens, whom it lets through, when it closes, what it says."""

import logging

import pytest

from cachemgr.breaker import TROUBLES, Breaker
from tests.cachemgr.cluster.control.clock import TurnedClock

OPEN_S = 5.0


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def breaker(clock: TurnedClock) -> Breaker:
    return Breaker("peer b", open_s=OPEN_S, clock=clock)


def opened(breaker: Breaker) -> Breaker:
    for _ in range(TROUBLES):
        breaker.trouble("deadline")
    return breaker


def test_it_opens_after_three_troubles_in_a_row(breaker: Breaker, clock: TurnedClock) -> None:
    for _ in range(TROUBLES - 1):
        breaker.trouble("deadline")
        assert breaker.closed
        assert breaker.down_since is None
    breaker.trouble("deadline")
    assert breaker.state == "open"
    assert not breaker.admit()
    assert breaker.down_since == clock.now


def test_an_answer_between_troubles_starts_the_row_anew(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.trouble("lost")
        breaker.trouble("lost")
        assert breaker.closed
        breaker.answered()


def test_one_refused_connection_opens_it(breaker: Breaker) -> None:
    breaker.trouble("refused", refused=True)
    assert not breaker.admit()


def test_after_its_time_one_request_is_let_through(breaker: Breaker, clock: TurnedClock) -> None:
    opened(breaker)
    clock.turn(OPEN_S - 0.01)
    assert not breaker.due
    assert not breaker.admit()
    clock.turn(0.01)
    assert breaker.due
    assert [breaker.admit() for _ in range(3)] == [True, False, False]
    assert breaker.state == "half-open"
    assert not breaker.closed


def test_the_probe_decides(breaker: Breaker, clock: TurnedClock) -> None:
    opened(breaker)
    found_down = clock.now
    clock.turn(OPEN_S)
    assert breaker.admit()
    breaker.trouble("deadline")
    assert breaker.state == "open"
    assert breaker.down_since == found_down
    clock.turn(OPEN_S - 0.01)
    assert not breaker.admit()
    clock.turn(0.01)
    assert breaker.admit()
    breaker.answered()
    assert breaker.state == "closed"
    assert breaker.down_since is None
    assert [breaker.admit() for _ in range(3)] == [True] * 3


def test_a_probe_that_never_reports_does_not_hold_it(breaker: Breaker, clock: TurnedClock) -> None:
    opened(breaker)
    clock.turn(OPEN_S)
    assert breaker.admit()
    clock.turn(OPEN_S)
    assert breaker.admit()


def test_a_sign_of_life_makes_it_due_at_once(breaker: Breaker) -> None:
    breaker.hurry()
    assert not breaker.due
    opened(breaker).hurry()
    assert [breaker.admit() for _ in range(3)] == [True, False, False]
    breaker.hurry()
    assert not breaker.admit(), "one probe at a time"


def test_troubles_of_calls_sent_before_do_not_prolong_it(breaker: Breaker, clock: TurnedClock) -> None:
    opened(breaker)
    clock.turn(OPEN_S - 1)
    breaker.trouble("deadline")
    clock.turn(1)
    assert breaker.admit()


def test_it_says_when_it_opens_and_when_it_closes_once(
    breaker: Breaker, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        opened(breaker)
        clock.turn(OPEN_S)
        breaker.admit()
    breaker.answered()
    breaker.answered()
    assert [record.getMessage() for record in caplog.records] == [
        "peer b is down (deadline): not asked for 5 s",
        "peer b answers again after 15.0 s",
    ]
    assert breaker.opened == 1
