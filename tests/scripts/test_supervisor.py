"""The supervisor against doubles: no process, no socket, no real time."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from scripts.errors import TritonError
from scripts.server_process import StubProcess
from scripts.supervisor import Supervisor
from scripts.supervisor_contract import SupervisorSettings, Surroundings
from scripts.triton_http import ProbeResult

TOKEN = ProbeResult(alive=True, busy=False, timed_out=False, seconds=0.02, detail="one token")
BUSY = ProbeResult(alive=True, busy=True, timed_out=False, seconds=0.02, detail="queue full (503)")
LATE = ProbeResult(alive=False, busy=False, timed_out=True, seconds=2.0, detail="no token within 2 s")
DEAD = ProbeResult(alive=False, busy=False, timed_out=False, seconds=0.0, detail="stub is not healthy (400)")


@dataclass
class FakeServer:
    stubs_of: set[str]
    code: int | None = None
    killed: bool = False
    asked: bool = False
    killed_stubs: list[str] = field(default_factory=list)
    older: list[StubProcess] = field(default_factory=list)

    def exit_code(self) -> int | None:
        return self.code

    def stubs(self) -> list[StubProcess]:
        newest = [
            StubProcess(pid=number, model=model, started=100)
            for number, model in enumerate(sorted(self.stubs_of), 2)
        ]
        return [*newest, *self.older]

    def kill_stub(self, stub: StubProcess) -> None:
        self.killed_stubs.append(stub.model)
        self.stubs_of.discard(stub.model)
        self.older = [one for one in self.older if one != stub]

    def ask_to_stop(self) -> None:
        self.asked = True

    def wait(self, limit_s: float) -> bool:
        return self.asked

    def kill(self) -> None:
        self.killed = True

    def log_tail(self) -> str:
        return "E1 the reason"


@dataclass
class FakeControl:
    """Triton over the wire; `answer` is what a probe gets, unless its model has one of its own."""

    answer: ProbeResult = TOKEN
    answers: dict[str, ProbeResult] = field(default_factory=dict)
    ready: bool = True
    reachable: bool = True
    index: dict[str, tuple[str, str]] = field(default_factory=dict)
    unloaded: set[str] = field(default_factory=set)
    counters: str = "# a page\n"
    calls: list[str] = field(default_factory=list)
    on_load: Callable[[str], None] = lambda model: None

    def server_ready(self) -> bool:
        return self.ready and self.reachable

    def model_ready(self, model: str) -> bool:
        return self.reachable and model not in self.unloaded

    def repository_index(self) -> dict[str, tuple[str, str]]:
        if not self.reachable:
            raise ConnectionRefusedError
        return self.index

    def load(self, model: str) -> None:
        self.calls.append(f"load {model}")
        self.on_load(model)

    def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")

    def facade_target(self, model: str) -> str | None:
        return model.removesuffix("_sync") if model.endswith("_sync") else None

    def metrics(self) -> str:
        return self.counters

    def probe(self, model: str, *, limit_s: float) -> ProbeResult:
        return self.answers.get(model, self.answer)


class Rig:
    """A supervisor whose clock advances by what it sleeps."""

    def __init__(self, *models: str, control: FakeControl | None = None) -> None:
        self.models = models or ("m",)
        self.control = control or FakeControl()
        self.now = 0.0
        self.events: list[str] = []
        self.servers: list[FakeServer] = []
        self.cleanups = 0
        self.mapped_by: list[frozenset[int]] = []
        self.start_fails = False
        self.supervisor = Supervisor(
            self.models,
            start=self.start,
            cleanup=self.cleanup,
            control=self.control,
            around=Surroundings(clock=lambda: self.now, pause=self.pause, report=self.events.append),
            settings=SupervisorSettings(probe_every_s=1.0, tick_s=0.5, patience=3, ready_limit_s=10.0),
        )

    def start(self) -> FakeServer:
        self.servers.append(FakeServer(set(self.models), code=1 if self.start_fails else None))
        return self.servers[-1]

    def cleanup(self, users: frozenset[int] | None) -> None:
        if users is not None:
            self.mapped_by.append(users)
        else:
            self.cleanups += 1

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.pause(0.5)
            self.supervisor.tick()

    @property
    def server(self) -> FakeServer:
        return self.servers[-1]


def test_a_healthy_server_is_left_alone() -> None:
    rig = Rig("m", "m_sync")
    rig.supervisor.bring_up()
    rig.ticks(50)
    assert (rig.events, rig.control.calls, len(rig.servers)) == ([], [], 1)


def test_a_model_whose_process_died_is_unloaded_and_loaded() -> None:
    rig = Rig("m", "other")
    rig.control.on_load = lambda model: rig.server.stubs_of.add(model)
    rig.supervisor.bring_up()
    rig.server.stubs_of.discard("m")
    rig.ticks(10)
    assert rig.control.calls == ["unload m", "load m"]
    assert rig.events == ["m: its process died; loading it again", "m: serving again"]


def test_a_model_that_an_operator_unloaded_stays_unloaded() -> None:
    rig = Rig("m", "other")
    rig.supervisor.bring_up()
    rig.server.stubs_of.discard("m")
    rig.control.unloaded.add("m")
    rig.control.answer = TOKEN
    rig.ticks(20)
    assert rig.control.calls == []


def test_a_model_that_gives_no_token_is_killed_and_loaded_after_three_probes() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.control.answer = DEAD
    rig.ticks(4)  # two probes
    assert rig.control.calls == []
    rig.ticks(2)
    assert rig.server.killed_stubs == ["m"]
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
    rig = Rig("m")
    rig.control.counters = 'tensorcache_output_tokens_total{model="m"} 7\n'
    rig.supervisor.bring_up()
    rig.control.answer = LATE
    for count in range(10):
        still = 'tensorcache_output_tokens_total{model="m"} 7\n'
        rig.control.counters = still + f'tensorcache_requests_waiting{{model="m"}} {count}\n'
        rig.ticks(1)
    assert "load m" in rig.control.calls


def test_a_process_that_was_replaced_long_ago_is_ended() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.server.older = [StubProcess(pid=50, model="m", started=1)]
    rig.ticks(1199)
    assert rig.server.older
    rig.ticks(3)
    assert rig.server.older == []
    assert rig.control.calls == []


def test_no_room_is_alive_while_tokens_move() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.control.answer = BUSY
    for count in range(40):
        rig.control.counters = f'tensorcache_kv_tokens_used{{model="m"}} {count}\n'
        rig.ticks(1)
    assert rig.control.calls == []


def test_no_room_in_front_of_an_engine_that_hangs_is_death() -> None:
    rig = Rig("m")
    rig.control.counters = 'tensorcache_kv_tokens_used{model="m"} 7\n'
    rig.supervisor.bring_up()
    rig.control.answer = BUSY
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
    rig = Rig("m", "m_sync")
    rig.control.counters = 'tensorcache_kv_tokens_used{model="m"} 7\n'
    rig.supervisor.bring_up()
    rig.ticks(2)
    rig.control.answer = LATE
    rig.ticks(6)  # patience × probe_every_s
    assert rig.control.calls == ["unload m", "load m"]
    assert rig.server.killed_stubs == ["m"]


def test_the_end_of_the_server_is_noticed_while_it_is_asked_to_load() -> None:
    rig = Rig("m")
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
        "tritonserver ended with -9; starting it again in 1 s",
        "Triton is serving again",
    ]


def test_shared_memory_is_looked_after_for_the_stubs_that_live_now() -> None:
    rig = Rig("m", "other")
    rig.supervisor.bring_up()
    rig.ticks(4)
    assert rig.mapped_by == [frozenset((2, 3))] * 2


def test_pauses_between_restarts_are_short_again_after_a_healthy_minute() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    for healthy_ticks in (2, 2, 122, 2):
        rig.ticks(healthy_ticks)
        rig.server.code = -9
        rig.ticks(1)
    restarts = [event for event in rig.events if "starting it again" in event]
    assert [event.rsplit("in ", 1)[1] for event in restarts] == ["1 s", "2 s", "1 s", "2 s"]


def test_a_server_that_ended_is_started_again_and_cleaned_up_after() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.server.code = -9
    rig.ticks(1)
    assert len(rig.servers) == 2
    assert rig.cleanups == 1
    assert rig.servers[0].killed
    assert rig.events == ["tritonserver ended with -9; starting it again in 1 s", "Triton is serving again"]


def test_a_server_that_never_comes_back_is_given_up_with_growing_pauses() -> None:
    rig = Rig("m")
    rig.supervisor.bring_up()
    rig.server.code = 1
    rig.start_fails = True
    rig.control.ready = False
    with pytest.raises(TritonError, match="gave up after 5 tries"):
        rig.ticks(1)
    assert len(rig.servers) == 6
    assert [event.rsplit("in ", 1)[1] for event in rig.events] == ["1 s", "2 s", "4 s", "8 s", "16 s"]


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
