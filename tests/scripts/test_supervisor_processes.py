"""What the supervisor does about a process behind a model that died, lingers, or never came."""

from scripts.server_process import StubProcess
from tests.scripts.supervisor_rig import DEAD, TOKEN, Rig


def test_a_healthy_server_is_left_alone() -> None:
    rig = Rig("m", "m_sync")
    rig.supervisor.bring_up()
    rig.ticks(50)
    assert (rig.events, rig.control.calls, len(rig.servers)) == ([], [], 1)


def test_the_only_decoder_whose_process_died_costs_the_server_because_only_that_ends_its_streams() -> None:
    rig = Rig("m", "m_sync")
    rig.supervisor.bring_up()
    rig.server.stubs_of.discard("m")
    rig.ticks(2)
    assert rig.servers[0].killed
    assert not rig.servers[0].asked, "an orderly end waits for streams that never end"
    assert rig.control.calls == []
    assert rig.events == [
        "m: its process died; hung up on its clients; starting Triton again in 1 s",
        "Triton is serving again",
    ]


def test_one_of_several_decoders_whose_process_died_is_unloaded_and_loaded() -> None:
    rig = Rig("m", "other")
    rig.control.on_load = lambda model: rig.server.stubs_of.add(model)
    rig.supervisor.bring_up()
    rig.server.stubs_of.discard("m")
    rig.ticks(10)
    assert rig.control.calls == ["unload m", "load m"]
    assert rig.events == ["m: its process died; loading it again", "m: serving again"]


def test_a_facade_whose_process_died_is_unloaded_and_loaded() -> None:
    rig = Rig("m", "m_sync")
    rig.control.on_load = lambda model: rig.server.stubs_of.add(model)
    rig.supervisor.bring_up()
    rig.server.stubs_of.discard("m_sync")
    rig.ticks(10)
    assert rig.control.calls == ["unload m_sync", "load m_sync"]


def test_a_model_that_an_operator_unloaded_stays_unloaded() -> None:
    rig = Rig("m", "other")
    rig.supervisor.bring_up()
    rig.server.stubs_of.discard("m")
    rig.control.unloaded.add("m")
    rig.control.answer = TOKEN
    rig.ticks(20)
    assert rig.control.calls == []


def test_a_model_that_failed_to_load_is_tried_again() -> None:
    rig = Rig("m", "other")
    rig.supervisor.bring_up()
    rig.server.stubs_of.discard("m")
    rig.control.index["m"] = ("UNAVAILABLE", "arena: no room")
    rig.control.answers["m"] = DEAD
    rig.ticks(6)
    assert rig.control.calls == ["unload m", "load m"]


def test_a_process_that_was_replaced_long_ago_is_ended() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.server.older = [StubProcess(pid=50, model="m", started=1)]
    rig.ticks(1199)
    assert rig.server.older
    rig.ticks(3)
    assert rig.server.older == []
    assert rig.control.calls == []
