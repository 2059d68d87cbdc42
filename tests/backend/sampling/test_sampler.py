import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.errors import EngineFailed
from backend.generation import SamplingParams
from backend.sampling import SamplerRow
from tests.backend.sampling.conftest import MakeSampler

PROMPT = np.array([1, 2, 3], np.int64)


def random_logits(rows: int, size: int, *, seed: int = 0, scale: float = 3.0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(scale=scale, size=(rows, size)).astype(np.float32)


def packed(allowed: list[set[int]], size: int) -> npt.NDArray[np.int32]:
    words = np.zeros((len(allowed), -(-size // 32)), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def mixed_params(index: int) -> SamplingParams:
    choices = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=index),
        SamplingParams(temperature=0.7, top_p=0.9, seed=index),
        SamplingParams(temperature=1.3, top_k=20, seed=index),
        SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.4, frequency_penalty=0.5, seed=index),
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
        SamplingParams(temperature=1.0, top_k=700, top_p=0.95, min_p=0.01, seed=index),
    ]
    return choices[index % len(choices)]


def test_greedy_takes_the_first_of_the_heaviest(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(4)
    rows = [sampler.row(SamplingParams(), PROMPT) for _ in range(2)]
    sampled = sampler.sample(np.array([[0, 5, 5, 1], [-3, -2, -9, -4]], np.float32), rows)
    assert sampled.tokens.tolist() == [1, 1]
    assert sampled.logprobs is None
    assert sampled.failures == {}


def test_a_hardly_warm_temperature_is_greedy_and_a_tiny_one_does_not_overflow(
    make_sampler: MakeSampler,
) -> None:
    logits = np.array([[3e38, 2e38, -3e38]], np.float32)
    sampler = make_sampler(3)
    for temperature in (1e-30, 1e-6, 1e-3):
        row = sampler.row(SamplingParams(temperature=temperature), PROMPT)
        assert sampler.sample(logits, [row]).tokens.tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([32, 600, 1025, 2000]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    seed=st.integers(0, 10_000),
    order=st.permutations(range(9)),
)
def test_rows_do_not_see_each_other(
    make_sampler: MakeSampler, size: int, scale: float, seed: int, order: list[int]
) -> None:
    logits = random_logits(9, size, seed=seed, scale=scale)
    sampler = make_sampler(size)

    def fresh(index: int) -> SamplerRow:
        row = sampler.row(mixed_params(index), PROMPT, logprobs=index % 2 == 0)
        for token in range(index):
            row.accept(token)
        return row

    alone = [sampler.sample(logits[i : i + 1], [fresh(i)]) for i in range(9)]
    together = sampler.sample(logits[order], [fresh(i) for i in order])
    assert together.tokens.tolist() == [int(alone[i].tokens[0]) for i in order]
    assert together.logprobs is not None
    for place, i in enumerate(order):
        if i % 2 == 0:
            assert alone[i].logprobs is not None
            assert together.logprobs[place] == alone[i].logprobs[0]
        else:
            assert np.isnan(together.logprobs[place])


def test_same_seed_same_tokens_and_positions_differ(make_sampler: MakeSampler) -> None:
    logits = random_logits(1, 500, scale=0.5)

    def run(seed: int) -> list[int]:
        sampler = make_sampler(500)
        row = sampler.row(SamplingParams(temperature=1.0, seed=seed), PROMPT)
        tokens = []
        for _ in range(20):
            tokens.append(int(sampler.sample(logits, [row]).tokens[0]))
            row.accept(tokens[-1])
        return tokens

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert len(set(run(7))) > 10


def test_sampling_twice_without_accept_gives_the_same_token(make_sampler: MakeSampler) -> None:
    logits = random_logits(1, 500, scale=0.5)
    sampler = make_sampler(500)
    row = sampler.row(SamplingParams(temperature=1.0, seed=3), PROMPT)
    assert sampler.sample(logits, [row]).tokens == sampler.sample(logits, [row]).tokens


@pytest.mark.parametrize("size", [64, 5000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_fails_alone(make_sampler: MakeSampler, size: int, bad: float) -> None:
    params = [mixed_params(i) for i in range(7)]
    logits = random_logits(7, size)
    sampler = make_sampler(size)
    expected = sampler.sample(logits, [sampler.row(p, PROMPT, logprobs=True) for p in params])
    for broken in range(7):
        hurt = logits.copy()
        hurt[broken, 11] = bad
        sampled = sampler.sample(hurt, [sampler.row(p, PROMPT, logprobs=True) for p in params])
        assert list(sampled.failures) == [broken]
        assert isinstance(sampled.failures[broken], EngineFailed)
        assert sampled.tokens[broken] == -1
        others = [i for i in range(7) if i != broken]
        assert sampled.tokens[others].tolist() == expected.tokens[others].tolist()
        assert sampled.logprobs is not None
        assert np.isnan(sampled.logprobs[broken])


def test_minus_infinity_is_a_token_that_cannot_be(make_sampler: MakeSampler) -> None:
    logits = np.full((2, 40), -np.inf, np.float32)
    logits[0, 17] = -5
    sampler = make_sampler(40)
    sampled = sampler.sample(logits, [sampler.row(mixed_params(1), PROMPT) for _ in range(2)])
    assert sampled.tokens.tolist() == [17, -1]
    assert list(sampled.failures) == [1]


def test_logits_are_not_written(make_sampler: MakeSampler) -> None:
    logits = random_logits(7, 2000)
    before = logits.copy()
    logits.flags.writeable = False
    sampler = make_sampler(2000)
    rows = [sampler.row(mixed_params(i), PROMPT, min_tokens=5, eos_token_ids=(0,)) for i in range(7)]
    sampler.sample(logits, rows, allowed_mask=packed([set(range(1500))] * 7, 2000))
    assert np.array_equal(logits, before)


def test_eos_waits_for_min_tokens(make_sampler: MakeSampler) -> None:
    logits = np.array([[9, 8, 1]], np.float32)
    sampler = make_sampler(3)
    row = sampler.row(SamplingParams(), PROMPT, min_tokens=2, eos_token_ids=(0, 1))
    tokens = []
    for _ in range(3):
        tokens.append(int(sampler.sample(logits, [row]).tokens[0]))
        row.accept(tokens[-1])
    assert tokens == [2, 2, 0]
    assert row.position == len(PROMPT) + 3


@pytest.mark.parametrize("size", [33, 4000])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=2.0, top_p=0.9)])
def test_masked_tokens_are_never_chosen(make_sampler: MakeSampler, size: int, params: SamplingParams) -> None:
    allowed = [{0, 5, 32}, {31, 32}, set(), {7}]
    sampler = make_sampler(size)
    rows = [sampler.row(params, PROMPT) for _ in allowed]
    seen: list[set[int]] = [set() for _ in allowed]
    for step in range(60):
        sampled = sampler.sample(random_logits(4, size, seed=step), rows, allowed_mask=packed(allowed, size))
        assert list(sampled.failures) == [2]
        for row, tokens, token in zip(rows, seen, sampled.tokens, strict=True):
            tokens.add(int(token))
            row.accept(int(token))
    assert seen == [{0, 5, 32}, {31, 32}, {-1}, {7}]


def test_mask_and_min_tokens_may_leave_nothing(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(4)
    row = sampler.row(SamplingParams(), PROMPT, min_tokens=1, eos_token_ids=(2,))
    sampled = sampler.sample(np.zeros((1, 4), np.float32), [row], allowed_mask=packed([{2}], 4))
    assert "leave no token" in str(sampled.failures[0])


def test_logprobs_are_of_the_raw_logits(make_sampler: MakeSampler) -> None:
    logits = random_logits(2, 3000)
    params = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.5, seed=1)
    sampler = make_sampler(3000)
    sampled = sampler.sample(logits, [sampler.row(params, PROMPT, logprobs=True) for _ in range(2)])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert sampled.logprobs == pytest.approx(exact[[0, 1], sampled.tokens], abs=1e-5)


def test_repetition_counts_the_prompt_and_presence_does_not(make_sampler: MakeSampler) -> None:
    logits = np.array([[4.0, 3.0, 0.0]], np.float32)
    sampler = make_sampler(3)
    zero = np.array([0], np.int64)
    assert sampler.sample(logits, [sampler.row(SamplingParams(repetition_penalty=2.0), zero)]).tokens == [1]
    present = sampler.row(SamplingParams(presence_penalty=2.0), zero)
    assert sampler.sample(logits, [present]).tokens == [0]
    present.accept(0)
    assert sampler.sample(logits, [present]).tokens == [1]


def test_histories_grow_past_their_first_room(make_sampler: MakeSampler) -> None:
    size = 500
    sampler = make_sampler(size)
    row = sampler.row(SamplingParams(frequency_penalty=1.0), PROMPT)
    logits = np.zeros((1, size), np.float32)
    order = []
    for _ in range(size + 1):
        order.append(int(sampler.sample(logits, [row]).tokens[0]))
        row.accept(order[-1])
    assert order == [*range(size), 0]


def test_no_rows_is_an_empty_answer(make_sampler: MakeSampler) -> None:
    sampled = make_sampler(50).sample(np.zeros((0, 50), np.float32), [])
    assert len(sampled.tokens) == 0


@pytest.mark.parametrize("size", [304, 5000])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=4)]
)
def test_a_uniform_on_the_border_belongs_to_the_token_after_it(
    make_sampler: MakeSampler, size: int, params: SamplingParams
) -> None:
    logits = np.full((5, size), -np.inf, np.float32)
    logits[:, 300:304] = 1.5
    borders = np.array([0.0, 0.25, 0.5, 0.75, 1 - 2**-53])
    sampler = make_sampler(size, uniforms=lambda seeds, positions: borders)
    sampled = sampler.sample(logits, [sampler.row(params, PROMPT) for _ in borders])
    assert sampled.tokens.tolist() == [300, 301, 302, 303, 303]
