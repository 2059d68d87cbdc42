"""The promise on real parts, without Triton: the same text whatever was cached, batched, split or resumed."""

import pytest

from backend.errors import InvalidRequest
from backend.generation import FinishReason
from tests.backend.service_rig import KeptEngine, ServiceRig, host_cache, text_model

STORY = (
    "Once upon a time, in a small village by the sea, there lived a clockmaker who could repair anything. "
    "Every morning she opened her shop, wound the great clock above the door, and listened to its voice. "
    "One winter the clock fell silent, and with it the whole village seemed to hold its breath. She took it "
    "apart, gear by gear, and laid the pieces on a long white cloth, but nothing was broken and nothing was "
    "missing. So she put on her coat and walked down to the harbour to ask the one person older than it."
)
PROMPTS = ["The three largest cities of Japan are", "def fibonacci(n):\n", STORY]
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
TOKENS = 20


@pytest.fixture(scope="module")
def kept(engine, demo_release):
    return KeptEngine(engine(demo_release, lanes=8, threads=2))


@pytest.fixture(scope="module")
def text(demo_release):
    return text_model(demo_release)


@pytest.fixture
def rig(kept, text, tmp_path):
    with ServiceRig(kept, host_cache(kept.spec, tmp_path), text) as made:
        yield made


@pytest.fixture(scope="module", params=["greedy", "seeded"])
def wanted(request, kept, text, tmp_path_factory):
    """(options, texts of lone runs without cache)."""
    options = {"max_tokens": TOKENS, "ignore_eos": True, **(SEEDED if request.param == "seeded" else {})}
    with ServiceRig(kept, host_cache(kept.spec, tmp_path_factory.mktemp("lone")), text) as rig:
        lone = [rig.ask(prompt, no_cache=True, **options) for prompt in PROMPTS]
    assert [caller.cached for caller in lone] == [0, 0, 0]
    assert all(len(caller.ids) == TOKENS for caller in lone)
    return options, [caller.ids for caller in lone]


def test_first_and_cached_runs_say_what_a_lone_run_says(wanted, rig):
    options, ids = wanted
    first = [rig.ask(prompt, **options) for prompt in PROMPTS]
    again = [rig.ask(prompt, **options) for prompt in PROMPTS]
    assert [caller.ids for caller in first] == ids
    assert [caller.ids for caller in again] == ids
    assert first[2].cached == 0
    assert again[2].cached > 64


def test_batched_runs_say_what_a_lone_run_says(wanted, rig):
    options, ids = wanted
    batch = [rig.start(prompt, **options) for prompt in [*PROMPTS, *reversed(PROMPTS), PROMPTS[2]]]
    assert [caller.wait().ids for caller in batch] == [*ids, *reversed(ids), ids[2]]


def test_split_prefill_says_what_a_lone_run_says(wanted, kept, text, tmp_path):
    options, ids = wanted
    small = {"prefill_chunk_tokens": 17, "idle_chunk_tokens": 17, "lane_ttl_s": 0.0}
    with ServiceRig(kept, host_cache(kept.spec, tmp_path), text, **small) as rig:
        assert [rig.ask(prompt, **options).ids for prompt in PROMPTS] == ids
        restored = rig.ask(PROMPTS[2], **options)
    assert restored.ids == ids[2]
    assert restored.cached > 64


def test_a_restarted_backend_finds_the_blocks_and_says_the_same(wanted, kept, text, tmp_path):
    options, ids = wanted
    with ServiceRig(kept, host_cache(kept.spec, tmp_path), text) as rig:
        rig.ask(PROMPTS[2], **options)
    with ServiceRig(kept, host_cache(kept.spec, tmp_path), text) as rig:
        again = rig.ask(PROMPTS[2], **options)
    assert again.ids == ids[2]
    assert again.cached > 64


@pytest.mark.parametrize("lane_ttl_s", [0.0, 30.0])
@pytest.mark.parametrize("options", [{}, SEEDED], ids=["greedy", "seeded"])
def test_a_resumed_conversation_continues_as_if_never_interrupted(kept, text, tmp_path, lane_ttl_s, options):
    options = {**options, "ignore_eos": True}
    with ServiceRig(kept, host_cache(kept.spec, tmp_path), text, lane_ttl_s=lane_ttl_s) as rig:
        prompt = text.encode(STORY).tolist()
        whole = rig.ask(prompt, no_cache=True, max_tokens=60, **options)
        half = rig.ask(prompt, max_tokens=41, **options)
        rest = rig.ask(prompt + half.ids, max_tokens=19, **options)
    assert half.ids + rest.ids == whole.ids
    written = len(prompt) + 40
    assert rest.cached == written // 32 * 32, "blocks made by decode were not found"


def test_streamed_deltas_join_to_the_whole_text(rig):
    options = {"max_tokens": 40, "ignore_eos": True}
    streamed = rig.ask("Les élèves écrivent : 日本語 🙂", stream=True, **options)
    whole = rig.ask("Les élèves écrivent : 日本語 🙂", **options)
    assert len(whole.deltas) == 1
    assert len(streamed.deltas) > 5
    assert streamed.text == whole.text
    assert streamed.ids == whole.ids
    assert streamed.finals == whole.finals == 1


def test_a_shared_prefix_is_computed_once(kept, rig, text):
    prefix = text.encode(STORY).tolist()
    whole = len(prefix) // 32 * 32
    prompts = [[*prefix[:whole], 300 + i, 400, 500] for i in range(5)]
    before = kept.prefilled
    callers = [rig.start(prompt, max_tokens=4) for prompt in prompts]
    assert sorted(caller.wait().cached for caller in callers) == [0] + [whole] * 4
    assert kept.prefilled - before == whole + 3 * len(prompts)


def test_a_known_prompt_prefills_two_tokens(kept, rig):
    rig.ask(STORY, max_tokens=40, ignore_eos=True)
    before = kept.prefilled
    prompt = rig.ask(STORY, max_tokens=4)
    computed = kept.prefilled - before
    assert computed == prompt.last.usage.input_tokens - prompt.cached
    assert 2 <= computed < 2 + 32


def test_stop_word_ends_and_is_cut(rig):
    whole = rig.ask(PROMPTS[0], max_tokens=30).text
    stop = whole[10:14]
    stopped = rig.ask(PROMPTS[0], max_tokens=30, stop_words=[stop])
    assert stopped.last.finish is FinishReason.STOP
    assert stopped.text == whole[: whole.index(stop)]


def test_echo_puts_the_prompt_first(rig):
    plain = rig.ask(PROMPTS[0], max_tokens=5)
    echoed = rig.ask(PROMPTS[0], max_tokens=5, exclude_input_in_output=False, stream=True)
    assert echoed.text == PROMPTS[0] + plain.text
    assert echoed.ids == plain.ids


def test_logprobs_come_one_per_token(rig):
    caller = rig.ask(PROMPTS[0], max_tokens=6, return_logprobs=True, stream=True)
    values = [value for delta in caller.deltas for value in delta.logprobs]
    assert len(values) == len(caller.ids) == 6
    assert all(value <= 0 for value in values)


def test_a_caller_that_hangs_up_frees_the_lane(rig):
    caller = rig.start(PROMPTS[0], max_tokens=400, ignore_eos=True, stream=True)
    assert caller.first.wait(30)
    caller.gone = True
    caller.wait()
    assert caller.last.finish is FinishReason.CANCELLED
    assert len(caller.ids) < 400
    assert rig.cache.counters()["cache_pins"] == 0


def test_a_deadline_in_mid_stream_ends_with_what_there_is(rig):
    caller = rig.ask(
        PROMPTS[0], max_tokens=400, ignore_eos=True, stream=True, parameters={"timeout": 400_000}
    )
    assert caller.last.finish is FinishReason.DEADLINE
    assert 0 < len(caller.ids) < 400


def test_bad_input_is_answered_and_the_next_request_works(rig):
    refused = rig.ask("hello", temperature=-1.0)
    assert isinstance(refused.last.error, InvalidRequest)
    assert "temperature" in str(refused.last.error)
    assert refused.finals == 1
    assert rig.ask("hello", max_tokens=2).last.finish is not None
