import threading
import time
from types import SimpleNamespace

import pytest

from backend.errors import EngineFailed, Overloaded
from backend.generation import FinishReason
from backend.sampling import NumpySampler
from backend.step_loop import IDLE_BEAT_S, StepLoop
from engines import DeviceLostError, Logits
from tests.backend.doubles import VOCAB, Collected, FakeEngine, Rig, expected_text_ids, generation
from tests.waiting import wait_until

WAIT_S = 20.0


class Ending(Collected):
    """A sink that tells when the last delta came."""

    def __init__(self) -> None:
        super().__init__()
        self.first = threading.Event()
        self.done = threading.Event()

    def emit(self, delta) -> None:
        super().emit(delta)
        self.first.set()
        if self.ended:
            self.done.set()

    def wait(self) -> "Ending":
        assert self.done.wait(WAIT_S), "no end in time"
        return self


class Gate:
    """Holds the engine inside a call until opened."""

    def __init__(self, engine: FakeEngine) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        decode = engine.decode

        def held(*arguments):
            self.entered.set()
            assert self.opened.wait(WAIT_S)
            return decode(*arguments)

        engine.decode = held


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def loop(rig):
    made = StepLoop(SimpleNamespace(stepper=rig.stepper, rig=rig), max_inbox=8, clock=time.monotonic)
    yield made
    made.stop(drain_s=0.0)


def ask(loop, prompt, **options):
    sink, ticket, release = Ending(), loop.new_ticket(), loop.serving
    loop.submit(release.rig.open(ticket, generation(prompt, **options), sink), release)
    return ticket, sink


def test_answers_from_many_threads(rig, loop):
    loop.start()
    sinks = {}

    def caller(start):
        for i in range(5):
            sinks[start + i] = ask(loop, [start + i, 3, 4], max_tokens=5)[1].wait()

    threads = [threading.Thread(target=caller, args=(start,)) for start in (5, 15, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert {start: sink.ids for start, sink in sinks.items()} == {
        start: expected_text_ids([start, 3, 4], 5)
        for start in [*range(5, 10), *range(15, 20), *range(25, 30)]
    }


def test_idle_loop_sleeps_and_beats(rig, loop):
    turns = []
    submit = rig.scheduler.load
    rig.scheduler.load = lambda: turns.append(time.monotonic()) or submit()
    loop.start()
    ask(loop, [3, 4])[1].wait()
    before = len(turns)
    beat = loop.heartbeat
    wait_until(lambda: loop.heartbeat > beat)
    assert len(turns) - before <= 4, "an idle loop spins"


def test_a_broken_invariant_is_told_once_when_idle_and_the_loop_goes_on(rig, loop, caplog):
    rig.lanes.reserve(1)
    checks, told = [], threading.Event()
    check = rig.scheduler.check_integrity

    def checked():
        checks.append(1)
        try:
            check()
        finally:
            told.set()

    rig.scheduler.check_integrity = checked
    loop.start()
    assert ask(loop, [3, 4, 5], max_tokens=5)[1].wait().ids == expected_text_ids([3, 4, 5], 5)
    assert told.wait(IDLE_BEAT_S + WAIT_S)
    beat = loop.heartbeat
    wait_until(lambda: loop.heartbeat > beat)
    assert (loop.integrity_failures, len(checks)) == (1, 1)
    assert "the idle scheduler broke an invariant" in caplog.text
    assert ask(loop, [3, 4], max_tokens=2)[1].wait().ids == expected_text_ids([3, 4], 2)


def test_cancel_ends_a_running_request(rig, loop):
    gate = Gate(rig.engine)
    loop.start()
    ticket, sink = ask(loop, [3, 4, 5], max_tokens=50)
    assert gate.entered.wait(WAIT_S)
    loop.cancel(ticket)
    gate.opened.set()
    assert sink.wait().last.finish is FinishReason.CANCELLED
    assert len(sink.ids) <= 2


def test_stop_drains_what_is_open_and_refuses_the_rest(rig, loop):
    loop.start()
    sinks = [ask(loop, [i + 3, 4], max_tokens=6)[1] for i in range(3)]
    loop.stop(drain_s=WAIT_S)
    assert [sink.last.finish for sink in sinks] == [FinishReason.LENGTH] * 3
    with pytest.raises(Overloaded, match="closing"):
        ask(loop, [3, 4])
    assert not loop.ready
    loop.stop(drain_s=0.0)


def test_stop_fails_what_does_not_finish_in_time(rig, loop):
    gate = Gate(rig.engine)
    loop.start()
    _, running = ask(loop, [3, 4], max_tokens=60)
    _, queued = ask(loop, [5, 6], max_tokens=60)
    assert gate.entered.wait(WAIT_S)
    stopping = threading.Thread(target=loop.stop, kwargs={"drain_s": 0.0})
    stopping.start()
    gate.opened.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert all(isinstance(sink.wait().last.error, Overloaded) for sink in (running, queued))
    rig.check_idle()


def test_a_bug_in_the_loop_fails_open_requests_and_closes_the_door(rig, loop, caplog):
    gate = Gate(rig.engine)
    loop.start()
    _, running = ask(loop, [3, 4], max_tokens=60)
    assert gate.entered.wait(WAIT_S)
    _, queued = ask(loop, [5, 6], max_tokens=60)
    rig.sampler.sample = lambda *arguments, **more: 1 / 0
    gate.opened.set()
    for sink in (running, queued):
        assert isinstance(sink.wait().last.error, EngineFailed)
        assert "ZeroDivisionError" in str(sink.last.error)
    wait_until(lambda: not loop.ready)
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        ask(loop, [3, 4])
    assert "step loop failed" in caplog.text


def lost(*arguments, **more):
    raise DeviceLostError("GPU 0 is lost: an illegal memory access was encountered")


class LostLogits:
    __array__ = lost


@pytest.mark.parametrize("call", ["prefill", "decode", "logits"])
def test_a_lost_gpu_ends_the_loop_so_that_the_process_is_replaced(rig, loop, call):
    """No step works any more in this process: to fail one request after the other would help nobody."""
    gate = Gate(rig.engine)
    loop.start()
    _, running = ask(loop, [3, 4], max_tokens=60)
    assert gate.entered.wait(WAIT_S)
    sinks = [running, ask(loop, [*range(5, 20)], max_tokens=60)[1]]
    if call == "logits":
        rig.engine._logits = lambda rows: Logits(LostLogits())
        rig.stepper._sampler = NumpySampler(VOCAB)
    else:
        setattr(rig.engine, call, lost)
    gate.opened.set()
    for sink in sinks:
        assert "DeviceLostError" in str(sink.wait().last.error)
    loop.thread.join(WAIT_S)
    assert not loop.alive
    with pytest.raises(EngineFailed, match="GPU 0 is lost"):
        ask(loop, [3, 4])


def test_a_broken_scheduler_still_answers(rig, loop):
    gate = Gate(rig.engine)
    loop.start()
    _, running = ask(loop, [3, 4], max_tokens=60)
    assert gate.entered.wait(WAIT_S)
    rig.scheduler.plan = rig.scheduler.end = lambda *arguments, **more: 1 / 0
    gate.opened.set()
    assert isinstance(running.wait().last.error, EngineFailed)


def test_a_stuffed_inbox_refuses_at_the_door(rig, loop):
    gate = Gate(rig.engine)
    loop.start()
    ask(loop, [3, 4], max_tokens=2)
    assert gate.entered.wait(WAIT_S)
    sinks = [ask(loop, [5, i + 3], max_tokens=1)[1] for i in range(8)]
    with pytest.raises(Overloaded, match="queue is full: 8"):
        ask(loop, [6, 7])
    gate.opened.set()
    assert all(sink.wait().ids for sink in sinks)
