"""Everything at once: random requests with cancels, deadlines, a small cache and injected engine failures."""

import random

import pytest

from backend.generation import FinishReason
from engines import StepError
from tests.backend.doubles import BLOCK, FakeEngine, Rig, expected_text_ids
from tests.backend.service_rig import KeptEngine, ServiceRig, host_cache, text_model

KINDS = ("prefill", "decode", "export", "import")


@pytest.mark.parametrize("seed", range(6))
def test_200_random_requests_leave_nothing_behind(seed):
    rng = random.Random(seed)
    rig = Rig(
        engine=FakeEngine(lanes=rng.choice([1, 2, 5]), max_seq_len=96), lane_ttl_s=rng.choice([0.0, 50.0])
    )
    stems = [[rng.randrange(2, 60) for _ in range(rng.randrange(1, 60))] for _ in range(5)]
    open_requests = []
    asked = []
    while len(asked) < 200 or rig.stepper.busy:
        if len(asked) < 200 and rng.random() < 0.4:
            prompt = (rng.choice(stems) + [rng.randrange(2, 60) for _ in range(rng.randrange(0, 8))])[:90]
            deadline = rig.now + rng.randrange(1, 60) if rng.random() < 0.2 else None
            options = {"max_tokens": rng.randrange(1, 20), "deadline": deadline, "received": rig.now}
            ticket, sink = rig.ask(prompt, cached=rng.random() < 0.85, **options)
            asked.append((prompt, options["max_tokens"], sink))
            open_requests.append(ticket)
        if open_requests and rng.random() < 0.05:
            rig.stepper.cancel(open_requests.pop(rng.randrange(len(open_requests))))
        if rng.random() < 0.03:
            rig.engine.fail_on = {rng.choice(KINDS)}
        if rng.random() < 0.02:
            rig.cache.blocks.pop(next(iter(rig.cache.blocks), None), None)
        rig.cache.full = rng.random() < 0.1
        rig.now += 1
        rig.step()
    rig.check_idle()
    rig.engine.fail_on = set()
    completed = 0
    for prompt, max_tokens, sink in asked:
        assert sink.ended
        if sink.last.finish is not None:
            assert sink.ids == expected_text_ids(prompt, max_tokens)[: len(sink.ids)], "wrong KV was used"
        completed += sink.last.finish is FinishReason.LENGTH
    assert completed > 80
    assert sum(sink.last.usage.cached_tokens for _, _, sink in asked if sink.last.usage) > 20 * BLOCK


def test_200_random_requests_on_real_parts(engine, small_release, tmp_path):
    """The small random decoder, a small real arena, threads, failures: text stays right."""
    rng = random.Random(11)
    kept = KeptEngine(engine(lanes=4, threads=1))
    block = kept.spec.block_nbytes
    stems = [[rng.randrange(2, 200) for _ in range(rng.randrange(1, 120))] for _ in range(4)]
    failures = 0

    def fail_sometimes(kind):
        nonlocal failures
        if rng.random() < 0.004:
            failures += 1
            raise StepError(f"injected {kind} failure")

    cache = host_cache(kept.spec, tmp_path, host_bytes=12 * (block + 4096))
    settings = {"prefill_chunk_tokens": 32, "idle_chunk_tokens": 64, "max_queue_size": 400}
    with ServiceRig(kept, cache, text_model(small_release), **settings) as rig:
        jobs = []
        for _ in range(200):
            prompt = rng.choice(stems) + [rng.randrange(2, 200) for _ in range(rng.randrange(0, 6))]
            jobs.append((prompt, rng.randrange(1, 25)))
        kept.before_call = fail_sometimes
        callers = []
        for prompt, tokens in jobs:
            timeout = {"timeout": rng.randrange(1_000, 3_000_000)} if rng.random() < 0.1 else {}
            options = {"max_tokens": tokens, "ignore_eos": True, "no_cache": rng.random() < 0.1}
            callers.append(rig.start(prompt, parameters=timeout, **options))
            if rng.random() < 0.1:
                rng.choice(callers).gone = True
        for caller in callers:
            caller.wait()
        kept.before_call = lambda kind: None
        finished = [
            (job, caller) for job, caller in zip(jobs, callers, strict=True)
            if caller.last.finish is FinishReason.LENGTH
        ]  # fmt: skip
        assert len(finished) > 100
        for (prompt, tokens), caller in rng.sample(finished, 25):
            assert caller.ids == rig.ask(prompt, max_tokens=tokens, ignore_eos=True, no_cache=True).ids
        assert failures > 0
        assert cache.counters()["cache_pins"] == 0
        assert cache.counters()["cache_evicted_blocks_total"] > 0
        assert sum(caller.cached for _, caller in finished) > 0
        cache.check_integrity()
    assert all(caller.finals == 1 for caller in callers)
