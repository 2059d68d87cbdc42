"""Waiting longer each time, within a bound, and forgetting after a calm while."""

from scripts.backoff import Backoff


def test_doubles_up_to_the_limit() -> None:
    backoff = Backoff(first_s=1, limit_s=10, calm_s=100)
    assert [backoff.next_delay(now) for now in (0, 1, 2, 3, 4, 5)] == [1, 2, 4, 8, 10, 10]


def test_forgets_after_a_calm_while() -> None:
    backoff = Backoff(first_s=1, limit_s=10, calm_s=100)
    for now in (0, 1, 2):
        backoff.next_delay(now)
    backoff.recovered(50)
    assert backoff.next_delay(149) == 8
    backoff.recovered(200)
    assert backoff.next_delay(300) == 1


def test_tries_that_fail_slowly_are_no_calm() -> None:
    backoff = Backoff(first_s=1, limit_s=10, calm_s=100)
    assert [backoff.next_delay(now) for now in (0, 300, 600)] == [1, 2, 4]


def test_never_overflows() -> None:
    backoff = Backoff()
    assert max(backoff.next_delay(0.0) for _ in range(5000)) == 30
