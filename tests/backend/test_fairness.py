"""Lanes between principals: half of them while others wait, and nothing lost on the way."""

import itertools

import pytest

from backend.errors import Overloaded
from backend.generation import FinishReason
from backend.preemption import MAX_PREEMPTIONS
from backend.scheduler import SchedulerLimits
from backend.sequence import State
from tests.backend.doubles import BLOCK, FakeEngine, Rig, expected_text_ids

LONG = list(range(10, 23))


def rig_of(lanes: int, **options) -> Rig:
    return Rig(engine=FakeEngine(lanes=lanes, max_seq_len=128), **options)


def prompts(count: int, *, size: int = 9, first: int = 0) -> list[list[int]]:
    return [[2 + (first + number) % 60, *range(20, 19 + size)] for number in range(count)]


def held(rig: Rig, principal: str) -> int:
    return sum(seq.request.principal == principal for seq in rig.scheduler._running)


def preemptions(rig: Rig) -> float:
    return next(item.value for item in rig.scheduler.readings() if item.name == "preemptions_total")


def flooded(rig: Rig, count: int, *, steps: int = 6, **options):
    """A principal "a" that asks for all, and has been heard already."""
    asked = [(prompt, rig.ask(prompt, principal="a", **options)[1]) for prompt in prompts(count)]
    for _ in range(steps):
        rig.step()
    return asked


def test_who_is_alone_has_all_lanes_and_gives_half_back_when_another_waits():
    rig = rig_of(8)
    flooded(rig, 20, max_tokens=40)
    assert held(rig, "a") == 8
    for prompt in prompts(20, first=30):
        rig.ask(prompt, principal="b", max_tokens=40)
    for lanes in (1, 2, 3, 4, 4):
        rig.step()
        assert (held(rig, "a"), held(rig, "b")) == (8 - lanes, lanes), "one lane a step"
    assert preemptions(rig) == 4
    rig.run()
    assert not rig.scheduler._turns.lines


@pytest.mark.parametrize("lane_ttl_s", [0.0, 50.0])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("temperature", [0.0, 8.0], ids=["greedy", "seeded"])
def test_a_preempted_answer_is_the_answer(cached, temperature, lane_ttl_s):
    options = {"max_tokens": 25, "cached": cached, "temperature": temperature, "seed": 3}
    lone = []
    for prompt in prompts(2):
        alone = rig_of(2)
        lone.append(alone.ask(prompt, **options)[1])
        alone.run()
    rig = rig_of(2, lane_ttl_s=lane_ttl_s)
    asked = flooded(rig, 2, **options)
    before = [len(sink.ids) for _, sink in asked]
    _, other = rig.ask(LONG, principal="b", max_tokens=3)
    rig.now = 50.0
    rig.run()
    assert preemptions(rig) == 1
    assert other.ids == expected_text_ids(LONG, 3)
    assert all(0 < said < 25 for said in before)
    for (_, sink), alone in zip(asked, lone, strict=True):
        assert sink.ids == alone.ids
        assert sink.text == alone.text
        assert sink.last.usage == alone.last.usage, "usage as if it had never lost its lane"


def test_a_preempted_sequence_computes_no_more_than_what_no_block_holds():
    rig = rig_of(2)
    flooded(rig, 2, max_tokens=30, steps=12)
    victim = rig.scheduler._running[-1]
    rig.ask([5, 6, 7], principal="b", max_tokens=1)
    rig.step()
    assert victim.state is State.WAITING
    known = victim.length
    before = rig.engine.prefilled_tokens
    while victim.state is not State.DECODE:
        rig.step()
    assert rig.engine.prefilled_tokens - before == max(2, known - (known - 1) // BLOCK * BLOCK)
    rig.run()


def test_the_youngest_is_preempted_and_is_the_first_to_come_back():
    rig = rig_of(2)
    asked = flooded(rig, 4, max_tokens=12)
    rig.ask([5, 6, 7], principal="b", max_tokens=2)
    ended = []
    while rig.stepper.busy:
        rig.step()
        ended += [number for number, (_, sink) in enumerate(asked) if sink.ended and number not in ended]
    assert ended == [0, 1, 2, 3]
    rig.check_idle()


def test_nobody_is_preempted_for_ever():
    rig = rig_of(2)
    (_, first), (_, second) = flooded(rig, 2, max_tokens=60)
    victim = rig.scheduler._running[-1]
    for number in itertools.count():
        if second.ended:
            break
        assert number < 200
        _, other = rig.ask([5, 6, 2 + number % 50], principal="b", max_tokens=1)
        while not other.ended:
            rig.step()
        rig.step()
    assert victim.preemptions >= MAX_PREEMPTIONS
    rig.run()
    assert first.last.usage.output_tokens == second.last.usage.output_tokens == 60


@pytest.mark.parametrize("lanes", [2, 3, 8])
def test_long_answers_do_not_come_to_hold_all_lanes_for_good(lanes):
    """However often others come: whoever waits has a lane in the next step, and else none is left empty."""
    rig = rig_of(lanes)
    sinks = [sink for _, sink in flooded(rig, 2 * lanes, max_tokens=110)]
    for number in range(MAX_PREEMPTIONS * lanes + 8):
        assert held(rig, "a") == lanes
        _, other = rig.ask([5, 6, 2 + number % 50], principal="b", max_tokens=1)
        rig.step()
        assert other.ended, f"number {number} waits"
        rig.step()
    rig.run()
    assert {sink.last.usage.output_tokens for sink in sinks} == {110}


def test_a_lone_lane_is_taken_from_nobody_and_both_get_it_in_turn():
    rig = rig_of(1)
    flooded(rig, 10, max_tokens=5)
    _, other = rig.ask([5, 6, 7], principal="b", max_tokens=5)
    while not other.ended:
        rig.step()
    assert rig.scheduler.waiting >= 7, "it went before the flood"
    rig.run()
    assert preemptions(rig) == 0


def test_two_that_hold_half_each_take_nothing_from_each_other():
    rig = rig_of(3)
    flooded(rig, 9, max_tokens=30)
    for prompt in prompts(9, first=30):
        rig.ask(prompt, principal="b", max_tokens=30)
    for _ in range(20):
        rig.step()
    assert preemptions(rig) == 1
    assert (held(rig, "a"), held(rig, "b")) == (2, 1), "the third lane is not left empty"
    rig.run()


def test_who_waits_for_blocks_takes_no_lane_from_anybody():
    rig = rig_of(2)
    flooded(rig, 2, max_tokens=30)
    rig.cache.leases_ready = False
    _, other = rig.ask(LONG, principal="b", max_tokens=1)
    for _ in range(5):
        rig.step()
    assert preemptions(rig) == 0
    rig.cache.leases[-1].ready = True
    rig.cache.leases_ready = True
    rig.step()
    assert preemptions(rig) == 1
    rig.run()
    assert other.ids == expected_text_ids(LONG, 1)


def test_who_was_preempted_leaves_the_lane_to_those_whose_blocks_are_on_their_way():
    rig = rig_of(4)
    flooded(rig, 4, max_tokens=40)
    victim = rig.scheduler._running[-1]
    _, first = rig.ask([5, 6, 7], principal="b", max_tokens=2, cached=False)
    rig.cache.leases_ready = False
    rig.ask(LONG, principal="b", max_tokens=2)
    while not first.ended:
        rig.step()
    for _ in range(3):
        rig.step()
        victim.lease.ready = True
    assert (victim.lane, rig.lanes.free) == (None, 1)
    rig.cache.leases_ready = True
    for lease in rig.cache.leases:
        lease.ready = True
    rig.step()
    assert held(rig, "b") == 1
    rig.run()
    assert preemptions(rig) == 1
    assert len(victim.sink.ids) == 40


def test_a_flood_of_prompts_does_not_hold_up_the_first_token_of_another():
    limits = SchedulerLimits(max_queue_size=64, prefill_chunk_tokens=8, idle_chunk_tokens=8)
    rig = rig_of(8, limits=limits)
    for prompt in prompts(8, size=60):
        rig.ask(prompt, principal="a", max_tokens=5, cached=False)
    for _ in range(3):
        rig.step()
    _, other = rig.ask([5, 6, 7, 8], principal="b", max_tokens=2)
    rig.step()
    assert other.ids, "its prompt was in the first step after it came"
    rig.run()


def test_a_full_queue_is_full_for_those_who_filled_it():
    rig = rig_of(4, limits=SchedulerLimits(max_queue_size=3))
    asked = flooded(rig, 7, max_tokens=20, steps=0)
    _, refused = rig.ask(LONG, principal="a")
    assert isinstance(refused.last.error, Overloaded)
    others = [rig.ask(LONG, principal="b", max_tokens=3)[1] for _ in range(3)]
    assert [sink.ended for sink in others] == [False, False, True], "half of the lanes, and no more"
    assert "max_queue_size is 3" in str(others[2].last.error)
    rig.run()
    assert all(sink.last.finish is FinishReason.LENGTH for _, sink in asked)


def preempted(rig: Rig):
    """Somebody who was heard and has no lane; (ticket, sink)."""
    flooded(rig, 2, max_tokens=30)
    victim = rig.scheduler._running[-1]
    rig.ask(LONG, principal="b", max_tokens=30)
    rig.step()
    assert victim.state is State.WAITING
    return victim.ticket, victim.sink


def test_a_preempted_caller_that_leaves_is_told_what_there_was():
    rig = rig_of(2)
    ticket, sink = preempted(rig)
    said = list(sink.ids)
    rig.stepper.cancel(ticket)
    rig.stepper.flush()
    assert (sink.last.finish, sink.ids) == (FinishReason.CANCELLED, said)
    assert sink.last.usage.output_tokens == len(said) > 0
    rig.run()


def test_who_was_heard_is_not_withdrawn_and_ends_where_it_began():
    rig = rig_of(2)
    _, sink = preempted(rig)
    _, queued = rig.ask([7, 8, 9], principal="a", max_tokens=2)
    _, later = rig.ask([7, 8, 9], principal="b", max_tokens=2)
    assert [seq.sink for seq in rig.stepper.withdraw()] == [queued, later]
    rig.run()
    assert sink.last.usage.output_tokens == 30
    assert sink.ids == expected_text_ids(prompts(2)[1], 30)
    assert not queued.deltas


def test_a_preempted_maker_lets_those_go_on_who_waited_for_its_blocks():
    limits = SchedulerLimits(max_queue_size=64, prefill_chunk_tokens=4, idle_chunk_tokens=4)
    rig = rig_of(4, limits=limits)
    prefix = list(range(2, 42))
    sinks = [rig.ask([*prefix, 50 + number], principal="a", max_tokens=3)[1] for number in range(4)]
    for number in range(3):
        rig.ask([number + 3] * 40, principal="a", max_tokens=3)
    for _ in range(2):
        rig.step()
    assert held(rig, "a") == 4
    others = [rig.ask([number + 7] * 9, principal="b", max_tokens=3)[1] for number in range(4)]
    rig.run()
    for number, sink in enumerate(sinks):
        assert sink.ids == expected_text_ids([*prefix, 50 + number], 3)
    assert all(sink.ended for sink in others)


def test_waiting_principals_are_counted():
    rig = rig_of(1)
    flooded(rig, 3, max_tokens=9)
    rig.ask(LONG, principal="b")
    load = rig.scheduler.load()
    assert (load.requests_waiting, load.principals_waiting, load.requests_running) == (3, 2, 1)
    rig.run()
