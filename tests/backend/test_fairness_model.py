"""Any arrivals of any principals: lanes are shared by the rule, and every answer is that of a lone run."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from backend.preemption import MAX_PREEMPTIONS
from backend.scheduler import SchedulerLimits
from tests.backend.doubles import FakeEngine, Rig, expected_text_ids

LIMITS = SchedulerLimits(max_queue_size=400, prefill_chunk_tokens=8, idle_chunk_tokens=16)


@dataclass(frozen=True)
class Arrival:
    step: int
    principal: str
    prompt: tuple[int, ...]
    max_tokens: int
    cached: bool


def arrivals(principals: int):
    names = st.sampled_from("abcde"[:principals])
    # few stems, so that prefixes are shared and awaited
    prompts = st.tuples(st.integers(2, 4), st.integers(1, 30), st.integers(2, 60)).map(
        lambda drawn: (*[drawn[0] + number for number in range(drawn[1])], drawn[2])
    )
    one = st.builds(Arrival, st.integers(0, 60), names, prompts, st.integers(1, 25), st.booleans())
    return st.lists(one, min_size=1, max_size=40)


cases = st.integers(1, 5).flatmap(
    lambda principals: st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1000.0]), arrivals(principals))
)


@settings(max_examples=120, deadline=None)
@given(case=cases)
def test_lanes_are_shared_by_the_rule_and_every_answer_is_that_of_a_lone_run(case):
    lanes, lane_ttl_s, coming = case
    half = max(1, lanes // 2)
    rig = Rig(engine=FakeEngine(lanes=lanes, max_seq_len=64), limits=LIMITS, lane_ttl_s=lane_ttl_s)
    coming = sorted(coming, key=lambda arrival: arrival.step)
    answers = []
    work = sum(len(arrival.prompt) + arrival.max_tokens for arrival in coming)
    limit = 61 + (1 + MAX_PREEMPTIONS) * work + len(coming)
    for step in range(limit):
        while coming and coming[0].step <= step:
            arrival = coming.pop(0)
            _, sink = rig.ask(
                arrival.prompt,
                principal=arrival.principal,
                max_tokens=arrival.max_tokens,
                cached=arrival.cached,
            )
            answers.append((arrival, sink))
        if not coming and not rig.stepper.busy:
            break
        ready = wait_for_a_lane_alone(rig)
        waited = {name: tickets for name, tickets in waiting(rig).items() if name in ready}
        held = lanes_of(rig)
        rig.step()
        check_rule(rig, waited, held, half=half)
    assert not coming
    assert not rig.stepper.busy, "somebody starves"
    rig.check_idle()
    assert not rig.scheduler._turns.lines
    for arrival, sink in answers:
        assert sink.ids == expected_text_ids(arrival.prompt, arrival.max_tokens)


def waiting(rig):
    """Tickets by principal."""
    waited = {}
    for seq in rig.scheduler._turns:
        waited.setdefault(seq.request.principal, set()).add(seq.ticket)
    return waited


def wait_for_a_lane_alone(rig):
    """Principals of whom somebody does; what has no names waits for no blocks."""
    return {seq.request.principal for seq in rig.scheduler._turns if not seq.hashes}


def lanes_of(rig):
    held = {seq.request.principal: 0 for seq in rig.scheduler.open_sequences()}
    for seq in rig.scheduler._running:
        held[seq.request.principal] += 1
    return held


def check_rule(rig, waited, held, *, half):
    """Whoever waited a whole step and held fewer than half got a lane, if somebody went on with more."""
    after, still = lanes_of(rig), waiting(rig)
    above = [name for name in after if after[name] > half and held.get(name, 0) > half]
    assert len(above) <= 1
    for taker in above:
        for name, tickets in waited.items():
            if name != taker and held[name] < half:
                assert tickets - still.get(name, set()), f"{name} got nothing from {taker}"
