"""The promise on real parts: whoever loses a lane to another principal and gets one back says the same."""

import pytest

from backend.access import Access, AuditLog, Caller, NoLimits, Verb
from tests.backend.service_rig import KeptEngine, ServiceRig, host_cache, text_model

STORY = (
    "Once upon a time, in a small village by the sea, there lived a clockmaker who could repair anything. "
    "Every morning she opened her shop, wound the great clock above the door, and listened to its voice."
)
SEEDED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 7}
LANES, TOKENS = 4, 48


class Tenants:
    """An Authoriser who believes what it is told: a credential is a name."""

    principals = 2

    def authorise(self, parameters, *, verb):
        return Caller(parameters["api_key"], "shared", frozenset(Verb) - {Verb.ADMIN})

    def follow(self, listener):
        pass

    def close(self):
        pass


def ask_as(rig, name, prompt, **options):
    return rig.start(prompt, parameters={"api_key": name}, **options)


@pytest.fixture(scope="module")
def kept(engine, demo_release):
    return KeptEngine(engine(demo_release, lanes=LANES, threads=2))


@pytest.fixture
def rig(kept, demo_release, tmp_path):
    access = Access(Tenants(), NoLimits(), AuditLog("m"))
    cache = host_cache(kept.spec, tmp_path)
    with ServiceRig(kept, cache, text_model(demo_release), access=access, lane_ttl_s=0.0) as made:
        yield made


def preemptions(rig) -> float:
    stepper = rig.service._loop.serving.stepper
    return next(item.value for item in stepper.readings() if item.name == "preemptions_total")


@pytest.mark.parametrize("no_cache", [False, True], ids=["cached", "uncached"])
@pytest.mark.parametrize("options", [{}, SEEDED], ids=["greedy", "seeded"])
def test_text_with_preemptions_is_the_text_without(rig, options, no_cache):
    options = {"max_tokens": TOKENS, "ignore_eos": True, "return_logprobs": True, **options}
    prompts = [f"{number}. {STORY}" for number in range(LANES)]
    lone = [ask_as(rig, "a", prompt, no_cache=True, **options).wait() for prompt in prompts]
    assert preemptions(rig) == 0
    callers = [ask_as(rig, "a", prompt, stream=True, no_cache=no_cache, **options) for prompt in prompts]
    assert all(caller.first.wait(30) for caller in callers)
    others = [ask_as(rig, "b", f"{number} and {number} is", max_tokens=4) for number in range(2)]
    for caller in [*callers, *others]:
        caller.wait()
    assert preemptions(rig) == 2
    for caller, alone in zip(callers, lone, strict=True):
        assert caller.ids == alone.ids
        assert caller.text == alone.text
        assert caller.finals == 1
        said = [value for delta in caller.deltas for value in delta.logprobs]
        assert said == [value for delta in alone.deltas for value in delta.logprobs]
        assert caller.cached == 0
        assert caller.last.usage.output_tokens == TOKENS
    assert rig.cache.counters()["cache_pins"] == 0
