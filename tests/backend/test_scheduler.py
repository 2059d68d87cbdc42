import numpy as np
import pytest

from backend.errors import EngineFailed, Overloaded
from backend.generation import FinishReason
from backend.scheduler import SchedulerLimits
from tests.backend.doubles import BLOCK, DictCache, FakeEngine, Rig, expected_text_ids

PROMPT = list(range(10, 23))


SIZES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2, 33, 50]


@pytest.mark.parametrize("size", SIZES)
def test_every_prompt_size_answers_like_a_lone_uncached_run_first_and_second_time(size):
    rig = Rig()
    prompt = [(7 * i) % 60 + 2 for i in range(size)]
    answers = []
    for _ in range(3):
        _, sink = rig.ask(prompt, max_tokens=9)
        rig.run()
        answers.append(sink)
    assert [sink.ids for sink in answers] == [expected_text_ids(prompt, 9)] * 3
    whole = size // BLOCK * BLOCK
    assert [sink.last.usage.cached_tokens for sink in answers] == [0, *[max(0, min(whole, size - 2))] * 2]


def test_only_the_last_two_tokens_of_a_known_prompt_are_computed():
    rig = Rig()
    prompt = list(range(2, 2 + 4 * BLOCK))
    rig.ask(prompt)
    rig.run()
    before = rig.engine.prefilled_tokens
    rig.ask(prompt)
    rig.run()
    assert rig.engine.prefilled_tokens - before == 2


def test_blocks_made_by_decode_are_found_by_the_next_turn():
    rig = Rig()
    _, first = rig.ask(PROMPT, max_tokens=12)
    rig.run()
    longer = PROMPT + first.ids + [30, 31, 32]
    _, second = rig.ask(longer, max_tokens=4)
    rig.run()
    assert second.ids == expected_text_ids(longer, 4)
    written = len(PROMPT) + 11
    assert second.last.usage.cached_tokens == written // BLOCK * BLOCK


def test_no_cache_neither_reads_nor_writes():
    rig = Rig()
    _, first = rig.ask(PROMPT, cached=False)
    rig.run()
    assert not rig.cache.blocks
    assert not rig.cache.leases
    rig.ask(PROMPT)
    rig.run()
    stored = dict(rig.cache.blocks)
    _, second = rig.ask(PROMPT, cached=False, max_tokens=20)
    rig.run()
    assert second.last.usage.cached_tokens == 0
    assert rig.cache.blocks.keys() == stored.keys()
    assert second.ids[:8] == first.ids


def test_salt_separates_blocks():
    rig = Rig()
    rig.ask(PROMPT, salt="a")
    rig.run()
    _, other = rig.ask(PROMPT, salt="b")
    rig.run()
    assert other.last.usage.cached_tokens == 0


def test_admission_is_first_come_first_served_and_lanes_are_never_exceeded():
    rig = Rig(engine=FakeEngine(lanes=2))
    sinks = [rig.ask([10 + i, 11, 12], max_tokens=3)[1] for i in range(6)]
    order = []
    while rig.stepper.busy:
        rig.step()
        assert rig.scheduler.running <= 2
        order += [i for i, sink in enumerate(sinks) if sink.ended and i not in order]
    assert order == [0, 1, 2, 3, 4, 5]


def test_a_full_queue_refuses_and_the_others_are_unharmed():
    rig = Rig(engine=FakeEngine(lanes=1), limits=SchedulerLimits(max_queue_size=2))
    accepted = [rig.ask([5, 6, i + 7])[1] for i in range(3)]
    _, refused = rig.ask([5, 6, 20])
    assert isinstance(refused.last.error, Overloaded)
    assert "max_queue_size is 2" in str(refused.last.error)
    rig.run()
    assert all(sink.last.finish is FinishReason.LENGTH for sink in accepted)


def test_a_long_prompt_does_not_stall_running_streams():
    limits = SchedulerLimits(prefill_chunk_tokens=8, idle_chunk_tokens=64)
    rig = Rig(engine=FakeEngine(max_seq_len=256), limits=limits)
    _, running = rig.ask([3, 4, 5], max_tokens=60)
    rig.step()
    _, late = rig.ask([(i * 3) % 60 + 2 for i in range(150)], max_tokens=2)
    while not late.ids:
        said, calls = len(running.ids), len(rig.engine.calls)
        rig.step()
        new = rig.engine.calls[calls:]
        assert len(running.ids) == said + 1, "the running stream missed a step"
        assert sum(size for kind, size in new if kind == "prefill") <= 8
    rig.run()
    assert running.ids == expected_text_ids([3, 4, 5], 60)


def test_a_prefill_never_leaves_a_single_token_over():
    rig = Rig(limits=SchedulerLimits(prefill_chunk_tokens=8, idle_chunk_tokens=8))
    for size in range(2, 40):
        rig.ask([(size * i) % 50 + 2 for i in range(size)], cached=False, max_tokens=1)
    rig.run()
    assert min(size for kind, size in rig.engine.calls if kind == "prefill") == 2


def test_several_short_prompts_share_one_budget():
    rig = Rig(limits=SchedulerLimits(prefill_chunk_tokens=8, idle_chunk_tokens=12))
    for i in range(4):
        rig.ask([i + 5] * 4, cached=False)
    rig.step()
    assert rig.engine.calls == [("prefill", 4)] * 3


def test_identical_prefixes_that_arrive_together_are_computed_once():
    rig = Rig(engine=FakeEngine(lanes=8, max_seq_len=128))
    shared = [(5 * i) % 60 + 2 for i in range(10 * BLOCK)]
    prompts = [[*shared, 20 + i, 21, 22] for i in range(6)]
    sinks = [rig.ask(prompt, max_tokens=4)[1] for prompt in prompts]
    rig.run()
    assert [sink.ids for sink in sinks] == [expected_text_ids(prompt, 4) for prompt in prompts]
    assert rig.engine.prefilled_tokens == len(shared) + 3 * 6
    assert sorted(sink.last.usage.cached_tokens for sink in sinks) == [0] + [len(shared)] * 5


def test_others_pass_a_sequence_that_waits_for_anothers_block():
    rig = Rig(engine=FakeEngine(lanes=3, max_seq_len=128))
    shared = [(5 * i) % 60 + 2 for i in range(16 * BLOCK)]
    rig.ask(shared, max_tokens=2)
    rig.ask(shared, max_tokens=2)
    _, other = rig.ask([9, 8, 7], max_tokens=2)
    rig.step()
    rig.step()
    assert rig.scheduler.running == 2
    assert rig.scheduler.waiting == 1
    rig.run()
    assert other.ids == expected_text_ids([9, 8, 7], 2)


@pytest.mark.parametrize("how", ["cancel", "engine", "deadline"])
def test_when_the_maker_ends_early_the_next_one_makes_the_blocks(how):
    rig = Rig(engine=FakeEngine(lanes=4, max_seq_len=128))
    shared = [(5 * i) % 60 + 2 for i in range(16 * BLOCK)]
    maker, first = rig.ask(shared, max_tokens=2, deadline=50.0 if how == "deadline" else None)
    waiters = [rig.ask(shared, max_tokens=2)[1] for _ in range(2)]
    rig.step()
    if how == "cancel":
        rig.stepper.cancel(maker)
    elif how == "engine":
        rig.engine.fail_on = {"prefill"}
    else:
        rig.now = 51.0
    rig.run()
    assert first.ended
    assert not first.ids
    assert [sink.ids for sink in waiters] == [expected_text_ids(shared, 2)] * 2
    assert rig.engine.prefilled_tokens <= len(shared) + 2 * 2


def test_a_cache_that_takes_nothing_does_not_hold_waiters_up():
    cache = DictCache()
    cache.full = True
    rig = Rig(engine=FakeEngine(lanes=4, max_seq_len=128), cache=cache)
    shared = [(5 * i) % 60 + 2 for i in range(8 * BLOCK)]
    sinks = [rig.ask(shared, max_tokens=2)[1] for _ in range(3)]
    rig.run()
    assert [sink.ids for sink in sinks] == [expected_text_ids(shared, 2)] * 3


def test_a_sequence_waits_for_blocks_on_their_way_while_others_run():
    cache = DictCache()
    rig = Rig(cache=cache)
    cache.leases_ready = False
    _, slow = rig.ask(PROMPT, max_tokens=2)
    _, fast = rig.ask([3, 4], cached=False, max_tokens=2)
    for _ in range(5):
        rig.step()
    assert fast.ended
    assert not slow.ended
    cache.leases[0].ready = True
    rig.run()
    assert slow.ids == expected_text_ids(PROMPT, 2)


def test_cancel_frees_the_lane_before_the_next_step_and_says_so():
    rig = Rig(engine=FakeEngine(lanes=1))
    ticket, sink = rig.ask(PROMPT, max_tokens=30)
    _, waiting = rig.ask([4, 5, 6], max_tokens=1)
    rig.step()
    assert sink.ids
    assert not waiting.ids
    rig.stepper.cancel(ticket)
    rig.step()
    assert sink.last.finish is FinishReason.CANCELLED
    assert waiting.ids
    rig.stepper.cancel(ticket)
    rig.run()


def test_cancel_while_queued():
    rig = Rig(engine=FakeEngine(lanes=1))
    rig.ask(PROMPT, max_tokens=5)
    ticket, queued = rig.ask(PROMPT, max_tokens=5)
    rig.step()
    rig.stepper.cancel(ticket)
    rig.stepper.flush()
    assert queued.last.finish is FinishReason.CANCELLED
    assert queued.last.usage.output_tokens == 0
    rig.run()


def test_deadlines_end_waiting_and_running_requests():
    rig = Rig(engine=FakeEngine(lanes=1))
    _, running = rig.ask([3, 4, 5], max_tokens=50, deadline=10.0)
    _, waiting = rig.ask([6, 7, 8], max_tokens=50, deadline=10.0)
    rig.step()
    rig.now = 10.0
    rig.step()
    assert running.last.finish is FinishReason.DEADLINE
    assert running.ids == expected_text_ids([3, 4, 5], 1)
    assert (waiting.last.finish, waiting.last.error) == (FinishReason.DEADLINE, None)
    assert (waiting.text, waiting.last.usage.output_tokens) == ("", 0)
    rig.check_idle()


@pytest.mark.parametrize("call", ["prefill", "decode", "export"])
def test_an_engine_failure_fails_its_batch_and_the_next_request_works(call):
    rig = Rig(limits=SchedulerLimits(idle_chunk_tokens=32))
    sinks = [rig.ask([i + 3] * 6, max_tokens=6)[1] for i in range(3)]
    rig.engine.fail_on = {call}
    rig.run()
    failed = [sink for sink in sinks if sink.last.error is not None]
    assert len(failed) == (3 if call == "decode" else 1)
    assert all(isinstance(sink.last.error, EngineFailed) for sink in failed)
    _, after = rig.ask([3] * 6, max_tokens=6)
    rig.run()
    assert after.ids == expected_text_ids([3] * 6, 6)


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_logits_that_are_not_numbers_end_the_request_and_its_blocks_are_not_offered(call):
    rig = Rig(limits=SchedulerLimits(idle_chunk_tokens=BLOCK))
    sound = getattr(rig.engine, call)
    calls = 0

    def poisoned(*arguments):
        nonlocal calls
        calls += 1
        logits = sound(*arguments)
        if calls == 2:
            logits.array[0, 5] = np.nan
        return logits

    setattr(rig.engine, call, poisoned)
    prompt = PROMPT[: 3 * BLOCK - 1] if call == "prefill" else PROMPT[: BLOCK + 2]
    _, failed = rig.ask(prompt, max_tokens=9)
    rig.run()
    assert isinstance(failed.last.error, EngineFailed)
    assert rig.cache.lookup(rig.cache.hashes(prompt + failed.ids, namespace="default")) == 1
    _, after = rig.ask(prompt, max_tokens=9)
    rig.run()
    assert after.ids == expected_text_ids(prompt, 9)


def test_an_engine_that_cannot_import_fails_that_request_only():
    rig = Rig()
    rig.ask(PROMPT)
    rig.run()
    rig.engine.fail_on = {"import"}
    _, failed = rig.ask(PROMPT)
    rig.run()
    assert isinstance(failed.last.error, EngineFailed)
    _, after = rig.ask(PROMPT)
    rig.run()
    assert after.ids == expected_text_ids(PROMPT, 8)


def test_a_broken_cache_is_a_miss(caplog):
    rig = Rig()
    _, first = rig.ask(PROMPT)
    rig.cache.broken = True
    rig.run()
    assert first.ids == expected_text_ids(PROMPT, 8)
    assert rig.reuse.cache_errors > 0
    assert "cache call failed" in caplog.text


def test_a_restore_that_breaks_in_the_middle_is_a_miss(caplog):
    rig = Rig()
    rig.ask(PROMPT)
    rig.run()

    def restore(lease, *, first, sink):
        sink(range(first, first + 1), [rig.cache.blocks[lease.names[first]]])
        raise RuntimeError("the arena is gone")

    rig.cache.restore = restore
    _, sink = rig.ask(PROMPT)
    rig.run()
    assert sink.ids == expected_text_ids(PROMPT, 8)
    assert sink.last.usage.cached_tokens == 0
    assert "the arena is gone" in caplog.text


def test_a_block_lost_between_lookup_and_restore_is_computed():
    rig = Rig()
    rig.ask(list(range(2, 26)))
    rig.run()
    names = rig.cache.hashes(list(range(2, 26)), namespace="default")
    _, sink = rig.ask(list(range(2, 26)))
    lease_all = rig.cache.lookup
    rig.cache.lookup = lambda hashes: len(hashes)
    del rig.cache.blocks[names[2]]
    rig.step()
    rig.cache.lookup = lease_all
    rig.run()
    assert sink.ids == expected_text_ids(list(range(2, 26)), 8)
    assert sink.last.usage.cached_tokens == 2 * BLOCK


def test_the_end_of_the_room_is_a_length_end():
    rig = Rig(engine=FakeEngine(max_seq_len=16))
    prompt = list(range(2, 12))
    _, sink = rig.ask(prompt, max_tokens=1000)
    _, brim = rig.ask(list(range(2, 18)), max_tokens=1000)
    rig.run()
    assert sink.last.finish is FinishReason.LENGTH
    assert len(sink.ids) == 7
    assert brim.last.finish is FinishReason.LENGTH
    assert len(brim.ids) == 1
    assert sink.ids == expected_text_ids(prompt, 7)
