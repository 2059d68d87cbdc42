"""A whole decoder service whose engine call hangs: what its callers see, and that it can be closed."""

import threading

import pytest

from backend.errors import BackendStuck
from backend.generation import FinishReason
from tests.backend.service_rig import WAIT_S, Caller, KeptEngine, ServiceRig, host_cache, text_model
from tests.waiting import wait_until

LIMIT_S = 2.0
PROMPT = [5, 6, 7, 8, 9]


class Hanging:
    """Holds the engine inside a call until it is let go."""

    def __init__(self, engine: KeptEngine, kind: str) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._engine, self._kind = engine, kind
        engine.before_call = self._hold

    def _hold(self, kind):
        if kind == self._kind:
            self.entered.set()
            assert self.opened.wait(WAIT_S)

    def let_go(self):
        self._engine.before_call = lambda kind: None
        self.opened.set()


@pytest.fixture
def kept(engine):
    made = KeptEngine(engine())
    made.closed = False

    def close():
        made.closed = True

    made.close = close
    return made


@pytest.fixture
def rig(kept, small_release, tmp_path):
    made = ServiceRig(
        kept, host_cache(kept.spec, tmp_path), text_model(small_release), watchdog_s=LIMIT_S, drain_s=WAIT_S
    )
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_callers_of_a_hanging_engine_are_told_and_it_serves_again_when_it_comes_back(rig, kept, kind):
    before = rig.ask(PROMPT, max_tokens=8, ignore_eos=True)
    hanging = Hanging(kept, kind)
    callers = [rig.start([n, *PROMPT], max_tokens=8, ignore_eos=True) for n in (11, 12)]
    assert hanging.entered.wait(WAIT_S)
    for caller in callers:
        assert isinstance(caller.wait().last.error, BackendStuck)
    assert not rig.service.ready
    refused = rig.start(PROMPT, max_tokens=2)
    assert refused.finals == 1, "not refused on the spot"
    assert str(refused.last.error).startswith(
        "the backend is stuck: step-loop hangs (limit 2 s), silent for "
    )
    hanging.let_go()
    wait_until(lambda: rig.service.ready)
    again = rig.ask(PROMPT, max_tokens=8, ignore_eos=True)
    assert (again.ids, again.last.finish) == (before.ids, FinishReason.LENGTH)
    assert [caller.finals for caller in callers] == [1, 1]


def test_a_service_whose_engine_hangs_is_closed_without_it(rig, kept, caplog):
    hanging = Hanging(kept, "decode")
    caller = rig.start(PROMPT, max_tokens=8, ignore_eos=True)
    assert hanging.entered.wait(WAIT_S)
    closing = threading.Thread(target=rig.close)
    closing.start()
    assert isinstance(caller.wait().last.error, BackendStuck)
    closing.join(WAIT_S / 2)
    assert not closing.is_alive(), "it waits for the call that hangs, or for its time to drain"
    assert not kept.closed, "the engine was freed under a call"
    assert "step loop did not end" in caplog.text
    hanging.let_go()


def test_refusals_do_not_need_the_replies_thread(rig):
    stuck, let_go = threading.Event(), threading.Event()

    class Blocking(Caller):
        def send(self, delta, *, final):
            stuck.set()
            assert let_go.wait(WAIT_S)
            super().send(delta, final=final)

    blocking = rig.start(PROMPT, max_tokens=2, caller=Blocking())
    assert stuck.wait(WAIT_S)
    wait_until(lambda: not rig.service.ready)
    refused = rig.start(PROMPT, max_tokens=2)
    let_go.set()
    assert refused.finals == 1
    assert "replies hangs" in str(refused.last.error)
    assert blocking.wait().last.finish is FinishReason.LENGTH


def test_a_loop_that_died_unasked_ends_open_streams(rig, monkeypatch):
    hanging = Hanging(rig.engine, "decode")
    caller = rig.start(PROMPT, max_tokens=8, ignore_eos=True)
    assert hanging.entered.wait(WAIT_S)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def die(kind):
        raise SystemExit

    rig.engine.before_call = die
    hanging.opened.set()
    assert "step-loop has ended" in str(caller.wait().last.error)
    assert not rig.service.ready
