"""A long call is attended: what it raises arrives, and so does what the look at the world raises."""

import threading

import pytest

from scripts.attended import attended


def test_the_call_is_run_to_its_end() -> None:
    looks = threading.Semaphore(0)
    done = []

    def call() -> None:
        looks.acquire(timeout=10)
        looks.acquire(timeout=10)
        done.append(True)

    attended(call, between=looks.release)
    assert done == [True]


def test_what_the_call_raises_arrives() -> None:
    def call() -> None:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        attended(call, between=lambda: None)


def test_what_the_look_raises_does_not_wait_for_the_call() -> None:
    release = threading.Event()

    def look() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attended(lambda: release.wait(30) and None, between=look)
    release.set()
