"""What the supervisor makes of probes: stuck, silent or merely busy, and how soon it is repaired."""

import pytest

from scripts.supervisor_contract import SupervisorSettings
from scripts.triton_http import ProbeResult
from tests.scripts.supervisor_rig import BUSY, DEAD, LATE, STUCK, Rig


def test_a_model_that_gives_no_token_is_killed_and_loaded_after_three_probes() -> None:
    rig = Rig("m", "other")
    rig.supervisor.bring_up()
    rig.control.answers["m"] = DEAD
    rig.ticks(4)  # two probes
    assert rig.control.calls == []
    rig.ticks(2)
    assert rig.server.killed_stubs == ["m"]
    assert rig.control.calls == ["unload m", "load m"]


def test_a_model_that_says_it_is_stuck_is_believed_at_once() -> None:
    rig = Rig("m", "other")
    rig.supervisor.bring_up()
    rig.control.answers["m"] = STUCK
    rig.ticks(2)
    assert rig.server.killed_stubs == ["m"]
    assert rig.control.calls == ["unload m", "load m"]
    assert rig.events[0] == "m: no token: the backend is stuck (400); loading it again"


def test_answers_from_before_the_supervisor_itself_was_stopped_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig("m", "other")
    rig.supervisor.bring_up()
    rig.control.answers["m"] = STUCK
    probe = rig.control.probe

    def stopped_after(model: str, *, limit_s: float) -> ProbeResult:
        rig.pause(8.0)
        return probe(model, limit_s=limit_s)

    monkeypatch.setattr(rig.control, "probe", stopped_after)
    rig.ticks(2)
    assert rig.server.killed_stubs == []
    rig.ticks(2)  # it is believed the second time, however late
    assert rig.server.killed_stubs == ["m"]


def test_the_only_decoder_that_says_it_is_stuck_is_back_within_seconds() -> None:
    rig = Rig("m", "m_sync", settings=SupervisorSettings())
    rig.supervisor.bring_up()
    rig.answer_after_a_restart()
    rig.control.answer = STUCK
    rig.ticks(10)  # probe_every_s
    assert rig.events[-1] == "Triton is serving again"
    assert rig.control.calls == []


def test_the_only_decoder_that_is_frozen_costs_the_server() -> None:
    rig = Rig("m", "m_sync")
    rig.supervisor.bring_up()
    rig.answer_after_a_restart()
    rig.control.answers["m"] = DEAD
    rig.on_start = rig.control.answers.clear
    rig.ticks(6)
    assert rig.servers[0].killed
    assert rig.events == [
        "m: no token: stub is not healthy (400); hung up on its clients; starting Triton again in 1 s",
        "Triton is serving again",
    ]


def test_a_bad_probe_is_followed_by_others_soon() -> None:
    rig = Rig("m", "other", settings=SupervisorSettings(probe_every_s=5.0, doubt_every_s=1.0))
    rig.supervisor.bring_up()
    rig.control.answers["m"] = DEAD
    rig.ticks(13)
    assert rig.control.calls == []
    rig.ticks(1)  # 5 s, then twice 1 s
    assert rig.control.calls == ["unload m", "load m"]


def test_a_late_probe_of_a_model_whose_counters_move_is_no_death() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.control.answer = LATE
    for count in range(40):
        rig.control.counters = f'tensorcache_output_tokens_total{{model="m"}} {count}\n'
        rig.ticks(1)
    assert rig.control.calls == []


def test_a_late_probe_of_a_model_that_stands_still_is_death_even_if_requests_arrive() -> None:
    rig = Rig("m", "other")
    rig.control.counters = 'tensorcache_output_tokens_total{model="m"} 7\n'
    rig.supervisor.bring_up()
    rig.control.answers["m"] = LATE
    for count in range(10):
        still = 'tensorcache_output_tokens_total{model="m"} 7\n'
        rig.control.counters = still + f'tensorcache_requests_waiting{{model="m"}} {count}\n'
        rig.ticks(1)
    assert "load m" in rig.control.calls


def test_no_room_is_alive_while_tokens_move() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.control.answer = BUSY
    for count in range(40):
        rig.control.counters = f'tensorcache_kv_tokens_used{{model="m"}} {count}\n'
        rig.ticks(1)
    assert rig.control.calls == []


def test_no_room_in_front_of_an_engine_that_hangs_is_death() -> None:
    rig = Rig("m", "other")
    rig.control.counters = 'tensorcache_kv_tokens_used{model="m"} 7\n'
    rig.supervisor.bring_up()
    rig.control.answers["m"] = BUSY
    rig.ticks(8)
    assert rig.control.calls == ["unload m", "load m"]


def test_a_facade_of_a_busy_decoder_is_left_alone() -> None:
    rig = Rig("m", "m_sync")
    rig.supervisor.bring_up()
    rig.control.answer = LATE
    for count in range(40):
        rig.control.counters = f'tensorcache_kv_tokens_used{{model="m"}} {count}\n'
        rig.ticks(1)
    assert rig.control.calls == []


def test_a_facade_that_is_silent_before_an_idle_decoder_is_loaded_again() -> None:
    rig = Rig("m", "m_sync")
    rig.supervisor.bring_up()
    rig.control.answers["m_sync"] = LATE
    rig.ticks(6)
    assert rig.control.calls == ["unload m_sync", "load m_sync"]


def test_a_decoder_that_hangs_is_loaded_again_in_time_and_its_facade_is_not_blamed() -> None:
    rig = Rig("m", "m_sync", "other")
    rig.control.counters = 'tensorcache_kv_tokens_used{model="m"} 7\n'
    rig.supervisor.bring_up()
    rig.ticks(2)
    rig.control.answers |= {"m": LATE, "m_sync": LATE}
    rig.ticks(6)  # patience × probe_every_s
    assert rig.control.calls == ["unload m", "load m"]
    assert rig.server.killed_stubs == ["m"]
