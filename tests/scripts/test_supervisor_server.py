"""What the supervisor does about the end of the server itself."""

import threading
import time

import msgspec
import pytest

from scripts.errors import TritonError
from tests.scripts.supervisor_rig import LATE, SETTINGS, TOKEN, FakeServer, Rig


def test_a_server_that_ended_is_started_again_and_cleaned_up_after() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.server.code = -9
    rig.ticks(1)
    assert len(rig.servers) == 2
    assert rig.cleanups == 1
    assert rig.servers[0].killed
    assert rig.events == [
        "tritonserver ended with -9; starting Triton again in 1 s",
        "Triton is serving again",
    ]


def test_the_end_of_the_server_is_noticed_while_it_is_asked_to_load() -> None:
    rig = Rig("m", "other")
    asked, answered = threading.Event(), threading.Event()

    def never_answered(model: str) -> None:
        rig.server.code = -9
        asked.set()
        answered.wait(30)

    rig.control.on_load = never_answered
    rig.supervisor.bring_up()
    rig.server.stubs_of.discard("m")
    began = time.monotonic()
    rig.ticks(2)
    answered.set()
    assert asked.is_set()
    assert time.monotonic() - began < 10
    assert rig.servers[0].killed
    assert rig.events[1:] == [
        "tritonserver ended with -9; starting Triton again in 1 s",
        "Triton is serving again",
    ]


@pytest.mark.parametrize(
    ("limit_s", "pauses"),
    [(30.0, ["1 s", "2 s", "4 s", "8 s", "16 s"]), (3.0, ["1 s", "2 s", "3 s", "3 s", "3 s"])],
)
def test_a_server_that_never_comes_back_is_given_up_with_growing_pauses(
    limit_s: float, pauses: list[str]
) -> None:
    rig = Rig("m", settings=msgspec.structs.replace(SETTINGS, pause_limit_s=limit_s))
    rig.supervisor.bring_up()
    rig.server.code = 1
    rig.start_fails = True
    rig.control.ready = False
    with pytest.raises(TritonError, match="gave up after 5 tries"):
        rig.ticks(1)
    assert len(rig.servers) == 6
    assert [event.rsplit("in ", 1)[1] for event in rig.events] == pauses


def test_a_server_that_no_longer_answers_is_killed_and_started_again() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.control.answer = LATE
    rig.control.reachable = False
    old = rig.server

    def reachable_again() -> FakeServer:
        rig.control.reachable, rig.control.answer = True, TOKEN
        return FakeServer({"m"})

    rig.supervisor._start = reachable_again
    rig.ticks(8)
    assert old.killed
    assert rig.events[-1] == "Triton is serving again"


def test_pauses_between_restarts_are_short_again_after_a_healthy_minute() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    for healthy_ticks in (2, 2, 122, 2):
        rig.ticks(healthy_ticks)
        rig.server.code = -9
        rig.ticks(1)
    restarts = [event for event in rig.events if "starting Triton again" in event]
    assert [event.rsplit("in ", 1)[1] for event in restarts] == ["1 s", "2 s", "1 s", "2 s"]


def test_shared_memory_is_looked_after_for_the_stubs_that_live_now() -> None:
    rig = Rig("m", "other")
    rig.supervisor.bring_up()
    rig.ticks(4)
    assert rig.mapped_by == [frozenset((2, 3))] * 2
