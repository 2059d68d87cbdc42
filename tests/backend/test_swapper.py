"""Interleavings of swaps with requests, deadlines, cancellations, closing and other swaps, over doubles."""

import itertools
import threading

import pytest

import backend.swapper
from backend.errors import Overloaded
from backend.generation import FinishReason
from tests.backend.doubles import expected_text_ids
from tests.backend.swap_doubles import WAIT_S, DoubleRig, gate
from tests.waiting import wait_until


def held(rig):
    """Hold the engine that serves inside its next decode."""
    engine = rig.engine
    engine.go.clear()
    return engine


def test_a_switch_in_mid_decode_keeps_every_stream(tmp_path):
    with DoubleRig(tmp_path) as rig:
        first = held(rig)
        callers = [rig.start([start, 3, 4], max_tokens=40) for start in range(5, 10)]
        assert first.entered.wait(WAIT_S)
        rig.point("b")
        first.go.set()
        rig.wait_for("b")
        assert first.closed
        for start, caller in zip(range(5, 10), callers, strict=True):
            assert caller.wait().ids == expected_text_ids([start, 3, 4], 40)
            assert caller.finals == 1
        assert rig.loop.load.kv_tokens_capacity == 2 * 64


def test_jobs_and_steps_take_turns(tmp_path):
    """Between two jobs of a swap every running stream gets a token."""
    with DoubleRig(tmp_path) as rig:
        caller = rig.start([5, 6], max_tokens=50)
        assert caller.first.wait(WAIT_S)
        rig.engine.go.clear()
        seen = []

        def looks():
            def job():
                assert rig.loop.job_since is not None
                seen.append(len(rig.engine.calls))

            for _ in range(5):
                rig.loop.call(job)

        asker = threading.Thread(target=looks)
        asker.start()
        rig.engine.go.set()
        asker.join(WAIT_S)
        caller.wait()
        assert len(seen) == 5
        busy = [later - earlier for earlier, later in itertools.pairwise(seen) if earlier < 48]
        assert all(steps >= 1 for steps in busy)
        assert rig.loop.job_since is None


def test_a_request_read_under_a_retired_release_is_read_again(tmp_path):
    with DoubleRig(tmp_path) as rig:
        old, held_up = rig.loop.serving, gate()
        begin = old.begin

        def late(*arguments):
            held_up.hold()
            return begin(*arguments)

        object.__setattr__(old, "begin", late)
        done = []
        asker = threading.Thread(target=lambda: done.append(rig.start([5, 6, 7])))
        asker.start()
        assert held_up.reached.wait(WAIT_S)
        rig.point("c")
        rig.wait_for("c")
        held_up.open.set()
        asker.join(WAIT_S)
        (caller,) = done
        assert caller.wait().ids == expected_text_ids([5, 6, 7], 8)
        assert [made.release[0] for made in caller.generations] == ["a", "c"]
        assert caller.finals == 1


def test_the_old_release_is_closed_after_its_last_sequence_and_not_before(tmp_path):
    with DoubleRig(tmp_path, lanes=1) as rig:
        old = held(rig)
        running, queued = rig.start([5, 6], max_tokens=5), rig.start([7, 8], max_tokens=5)
        assert old.entered.wait(WAIT_S)
        opening = gate()
        rig.opener.before = opening.hold
        rig.point("c")
        assert opening.reached.wait(WAIT_S)
        opening.open.set()
        old.go.set()
        rig.wait_for("c")
        assert rig.start([9, 9]).wait().release == "c" * 16
        assert [caller.wait().release[0] for caller in (running, queued)] == ["a", "a"]
        wait_until(lambda: old.closed)
        assert rig.swaps("ok") <= 1


def test_two_changes_in_a_row_end_at_the_last_one(tmp_path):
    with DoubleRig(tmp_path) as rig:
        opening = gate()
        rig.opener.before = opening.hold
        rig.point("c")
        assert opening.reached.wait(WAIT_S)
        rig.point("d")
        opening.open.set()
        rig.wait_for("d")
        assert rig.start([5, 6]).wait().release == "d" * 16
        wait_until(lambda: [engine.closed for engine in rig.opener.opened].count(False) == 1)


def test_closing_in_the_middle_of_a_swap_leaves_nothing_open(tmp_path):
    with DoubleRig(tmp_path) as rig:
        opening = gate()
        rig.opener.before = opening.hold
        rig.point("c")
        assert opening.reached.wait(WAIT_S)
        closing = threading.Thread(target=rig.service.close)
        closing.start()
        wait_until(lambda: not rig.loop.alive)
        opening.open.set()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert all(engine.closed for engine in rig.opener.opened)


def draining(rig, *, to="c", **options):
    """A drain that waits for one running request; (the running caller, its engine)."""
    old = held(rig)
    running = rig.start([5, 6], **{"max_tokens": 5, **options})
    assert old.entered.wait(WAIT_S)
    rig.point(to)
    wait_until(lambda: rig.loop.serving is None)
    return running, old


def test_requests_wait_out_a_drain_and_are_read_by_the_next_release(tmp_path):
    with DoubleRig(tmp_path, lanes=1, swap="drain") as rig:
        old = held(rig)
        running, queued = rig.start([5, 6], max_tokens=5), rig.start([7, 8], max_tokens=5)
        assert old.entered.wait(WAIT_S)
        rig.point("c")
        wait_until(lambda: rig.loop.serving is None)
        late = rig.start([9, 9], max_tokens=5)
        old.go.set()
        callers = (running, queued, late)
        assert [caller.wait().release[0] for caller in callers] == ["a", "c", "c"]
        prompts = ([5, 6], [7, 8], [9, 9])
        assert [caller.ids for caller in callers] == [expected_text_ids(prompt, 5) for prompt in prompts]
        assert [caller.finals for caller in callers] == [1, 1, 1]
        assert old.closed
        assert rig.service.ready


def test_deadline_and_cancellation_end_the_wait(tmp_path):
    with DoubleRig(tmp_path, swap="drain") as rig:
        running, old = draining(rig)
        expiring, leaving = rig.start([7, 8], timeout_us=50_000), rig.start([9, 9])
        assert expiring.wait().last.finish is FinishReason.DEADLINE
        leaving.gone = True
        assert leaving.wait().last.finish is FinishReason.CANCELLED
        assert rig.admission.waiting == 0
        old.go.set()
        assert running.wait().last.finish is FinishReason.LENGTH
        rig.wait_for("c")
        assert (expiring.finals, leaving.finals) == (1, 1)


def test_the_waiting_room_has_the_queues_bound(tmp_path):
    with DoubleRig(tmp_path, swap="drain", max_queue_size=3) as rig:
        _, old = draining(rig)
        callers = [rig.start([7, number + 3], max_tokens=3) for number in range(4)]
        assert isinstance(callers[3].wait().last.error, Overloaded)
        old.go.set()
        assert [caller.wait().release[0] for caller in callers[:3]] == ["c"] * 3


def test_a_drain_that_takes_too_long_is_put_off_and_fails_nobody(tmp_path):
    with DoubleRig(tmp_path, swap="drain", drain_s=0.05) as rig:
        rig.engine.patience = 0.02
        running, old = draining(rig, max_tokens=50)
        waiting = rig.start([7, 8], max_tokens=5)
        wait_until(lambda: rig.swaps("drain") >= 1)
        assert not running.done.is_set()
        old.go.set()
        assert running.wait().ids == expected_text_ids([5, 6], 50)
        assert waiting.wait().ids == expected_text_ids([7, 8], 5)
        rig.wait_for("c")


@pytest.mark.parametrize("mode", ["side_by_side", "drain"])
def test_an_unknown_release_leaves_the_old_one_and_who_waits_is_answered(tmp_path, mode):
    with DoubleRig(tmp_path, swap=mode) as rig:
        opening = gate()
        rig.opener.before = opening.hold
        rig.point("e")
        assert opening.reached.wait(WAIT_S)
        waiting = rig.start([7, 8], max_tokens=5)
        opening.open.set()
        assert waiting.wait().release == "a" * 16
        wait_until(lambda: rig.swaps("digest") == 1)
        assert waiting.ids == expected_text_ids([7, 8], 5)
        assert rig.serves("a")


def test_closing_while_requests_wait_tells_them(tmp_path):
    with DoubleRig(tmp_path, swap="drain", drain_s=0.0) as rig:
        opening = gate()
        rig.opener.before = opening.hold
        rig.point("c")
        assert opening.reached.wait(WAIT_S)
        waiting = rig.start([7, 8])
        closing = threading.Thread(target=rig.service.close)
        closing.start()
        wait_until(lambda: not rig.loop.alive)
        opening.open.set()
        closing.join(WAIT_S)
        assert isinstance(waiting.wait().last.error, Overloaded)
        assert waiting.finals == 1
        assert all(engine.closed for engine in rig.opener.opened)


def test_counters_never_turn_back(tmp_path):
    with DoubleRig(tmp_path) as rig:
        cached = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
        for letter in ("a", "c", "a"):
            rig.point(letter)
            rig.wait_for(letter)
            rig.start(cached).wait()
            rig.start(cached).wait()
        hits = [
            reading.value for reading in rig.process.ledger.readings()
            if (reading.name, reading.tier) == ("hit_tokens_total", "host")
        ]  # fmt: skip
        assert hits == [3 * 8]


@pytest.mark.parametrize("mode", ["side_by_side", "drain"])
def test_memory_goes_back_to_the_system_once_an_engine_is_closed(tmp_path, mode, monkeypatch):
    seen = []
    with DoubleRig(tmp_path, swap=mode) as rig:
        monkeypatch.setattr(
            backend.swapper,
            "give_back_freed_memory",
            lambda: seen.append([engine.closed for engine in rig.opener.opened]),
        )
        rig.point("c")
        rig.wait_for("c")
        wait_until(lambda: seen and seen[-1] == [True, False])
        if mode == "drain":
            assert seen[0] == [True], "before the new one is loaded"
        count = len(seen)
        rig.point("e")
        wait_until(lambda: len(seen) > count and rig.serves("c"))
        wait_until(lambda: seen[-1].count(False) == 1)


def test_what_is_counted_was_said_before(tmp_path, caplog):
    caplog.set_level("INFO", "backend.swapper")
    counted = []
    with DoubleRig(tmp_path) as rig:
        rig.process.metrics.swapped = lambda reason: counted.append((reason, caplog.records[-1].message))
        for number, letter in enumerate("ce", start=1):
            rig.point(letter)
            wait_until(lambda: len(counted) == number)  # noqa: B023  (called at once)
    assert counted[0][0] == "ok"
    assert counted[0][1].startswith("swap: release 1 (aaaaaaaaaaaaaaaa) → 1 (cccccccccccccccc)")
    assert counted[1][0] == "digest"
    assert counted[1][1].startswith("swap to eeeeeeeeeeeeeeee refused, cccccccccccccccc serves: digest: ")
