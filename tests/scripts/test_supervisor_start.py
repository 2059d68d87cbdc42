"""How the supervisor brings Triton up and takes it down."""

import pytest

from scripts.errors import TritonError
from tests.scripts.supervisor_rig import DEAD, FakeControl, FakeServer, Rig


def test_bring_up_says_at_once_why_a_model_does_not_load() -> None:
    rig = Rig(
        "m", control=FakeControl(ready=False, index={"m": ("UNAVAILABLE", "signature: expected a, found b")})
    )
    with pytest.raises(TritonError, match="m does not load: signature: expected a, found b"):
        rig.supervisor.bring_up()
    assert rig.now < 1


def test_bring_up_says_why_the_server_ended() -> None:
    rig = Rig("m", control=FakeControl(ready=False))
    rig.start_fails = True
    with pytest.raises(TritonError, match="ended with 1 while starting:\nE1 the reason"):
        rig.supervisor.bring_up()


def test_a_server_that_crashed_while_starting_is_started_once_more() -> None:
    rig = Rig("m", control=FakeControl(ready=False))

    def start() -> FakeServer:
        rig.control.ready = len(rig.servers) == 1
        rig.servers.append(FakeServer({"m"}, code=None if rig.control.ready else -6))
        return rig.server

    rig.supervisor._start = start
    rig.supervisor.bring_up()
    assert len(rig.servers) == 2
    assert rig.servers[0].killed
    assert rig.events == ["tritonserver ended with -6 while starting:\nE1 the reason\nstarting it once more"]


def test_a_server_that_crashes_twice_is_not_started_a_third_time() -> None:
    rig = Rig("m", control=FakeControl(ready=False))

    def start() -> FakeServer:
        rig.servers.append(FakeServer({"m"}, code=-6))
        return rig.server

    rig.supervisor._start = start
    with pytest.raises(TritonError, match="ended with -6"):
        rig.supervisor.bring_up()
    assert len(rig.servers) == 2


def test_bring_up_has_a_limit() -> None:
    rig = Rig("m", control=FakeControl(ready=False))
    with pytest.raises(TritonError, match="not ready after 10 s"):
        rig.supervisor.bring_up()
    assert 10 <= rig.now < 11


def test_bring_up_wants_a_token_of_every_model() -> None:
    rig = Rig("m", control=FakeControl(answer=DEAD))
    with pytest.raises(TritonError, match="m is loaded but gives no token: stub is not healthy"):
        rig.supervisor.bring_up()


def test_shut_down_stops_in_order_then_by_force_and_cleans_up_once() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.supervisor.shut_down()
    rig.supervisor.shut_down()
    assert rig.server.asked
    assert rig.server.killed
    assert rig.cleanups == 1
