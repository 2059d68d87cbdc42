"""A request to stop is never lost, even if the exception of the handler was."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from scripts.interruption import Interruption


def test_pauses_without_a_request_to_stop() -> None:
    slept: list[float] = []
    Interruption(sleep=slept.append).pause(0.5)
    assert slept == [0.5]


def test_a_lost_exception_comes_again_at_the_next_pause() -> None:
    slept: list[float] = []
    interruption = Interruption(sleep=slept.append)
    with contextlib.suppress(KeyboardInterrupt):
        interruption.ask(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        interruption.pause(0.5)
    assert slept == []


def test_a_request_during_the_pause_ends_it() -> None:
    def lose_it(seconds: float) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            interruption.ask(signal.SIGINT, None)

    interruption = Interruption(sleep=lose_it)
    with pytest.raises(KeyboardInterrupt):
        interruption.pause(0.5)


def test_what_is_held_is_done_whole() -> None:
    interruption = Interruption(sleep=lambda seconds: None)
    done = []
    with interruption.hold():
        interruption.ask(signal.SIGTERM, None)
        done.append("whole")
    assert done == ["whole"]
    with pytest.raises(KeyboardInterrupt):
        interruption.pause(0.5)
    with pytest.raises(KeyboardInterrupt):
        interruption.ask(signal.SIGTERM, None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_both_heard_and_then_ignored(number: signal.Signals) -> None:
    code = f"""
import os
from scripts.interruption import Interruption
made = Interruption()
made.install()
try:
    os.kill(os.getpid(), {int(number)})
    made.pause(30)
except KeyboardInterrupt:
    made.ignore()
    os.kill(os.getpid(), {int(number)})
    print("stopped in order")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, env=os.environ
    )
    assert (done.returncode, done.stdout) == (0, "stopped in order\n")
