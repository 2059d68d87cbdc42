"""A facade's call can be ended by who knows its id, while somebody works on it."""

import gc
import os
import signal
import subprocess

import pytest

from backend.calls import CALL, Calls, Process, new_call_id


def test_only_the_right_id_ends_a_call():
    calls, mine, other = Calls(), new_call_id(), new_call_id()
    call, untouched = calls.opened({CALL: mine}), calls.opened({CALL: other})
    for wrong in ("", mine[:-1], mine + "0", 7, None, [mine]):
        calls.cancel(wrong)
    assert not call.cancelled
    calls.cancel(mine)
    assert (call.cancelled, untouched.cancelled) == (True, False)


def test_a_call_is_forgotten_with_who_answers_it():
    calls, name = Calls(), new_call_id()
    call = calls.opened({CALL: name})
    assert len(calls._open) == 1
    del call
    gc.collect()
    assert len(calls._open) == 0
    calls.cancel(name)


@pytest.mark.parametrize("value", [None, True, 5, "", "x" * 32, "A" * 32, "0" * 31, "0" * 33])
def test_what_no_facade_writes_is_no_call(value):
    assert Calls().opened({CALL: value}) is None
    assert Calls().opened({}) is None


def test_a_killed_process_is_noticed_before_anybody_collects_it():
    child = subprocess.Popen(["sleep", "60"])
    process = Process(child.pid)
    assert not process.ended
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.ended
    process.close()
    child.wait()
