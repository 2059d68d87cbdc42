"""The form on tensors gives the token of the numpy form, but for near-ties that float32 cannot decide.

exp in float32 is right within an ulp or two, in either form: weights of one token differ by up to 2.4e-7. So
a token may differ only where, in exact arithmetic, the uniform or the border of the nucleus lies within 1e-6
of the mass between two tokens, or the lightest token that stays and the heaviest that goes weigh the same
within 1e-6.
"""

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from backend.generation import SamplingParams
from backend.sampling import NumpySampler, TorchSampler
from backend.sampling.philox import uniforms
from tests.backend.sampling.reference import distribution

NEAR = 1e-6
ROWS = 48
SHAPES = {  # what logits look like: standard deviation, and how far a few likely tokens stand out
    "flat": (0.01, 0.0),
    "spread": (1.0, 0.0),
    "peaked": (2.5, 12.0),
    "certain": (3.0, 40.0),
}


def shaped(name: str, size: int, random: np.random.Generator) -> npt.NDArray[np.float32]:
    deviation, lift = SHAPES[name]
    logits = random.normal(scale=deviation, size=(ROWS, size))
    likely = random.integers(0, size, (ROWS, 12))
    np.put_along_axis(
        logits, likely, np.take_along_axis(logits, likely, 1) + lift * random.random((ROWS, 12)), axis=1
    )
    return logits.astype(np.float32)


def any_params(random: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(random.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.6])),
        top_k=int(random.choice([0, 0, 0, 1, 5, 40, 700])),
        top_p=float(random.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.95, 0.999])),
        min_p=float(random.choice([0.0, 0.0, 0.02, 0.3])),
        repetition_penalty=float(random.choice([1.0, 1.0, 1.2])),
        presence_penalty=float(random.choice([0.0, 0.0, 0.7])),
        frequency_penalty=float(random.choice([0.0, 0.0, 0.4])),
        seed=int(random.integers(0, 2**63)),
    )


def undecided(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    position: int,
    tokens: set[int],
    *,
    prompt: list[int],
    output: list[int],
) -> bool:
    """Whether each of `tokens` can be drawn once u, the filters, and weights at their border move by NEAR."""
    u = float(uniforms(np.array([params.seed], np.uint64), np.array([position], np.uint64))[0])
    possible: set[int] = set()
    for nudge in (1 - NEAR, 1.0, 1 + NEAR):
        near = msgspec.structs.replace(
            params,
            top_p=params.top_p if params.top_p == 1 else params.top_p * nudge,
            min_p=params.min_p if params.min_p == 0 else params.min_p * nudge,
        )
        chances = distribution(logits, near, prompt=prompt, output=output)
        for values in (logits, border_swapped(logits, chances, params.temperature)):
            reached = np.cumsum(distribution(values, near, prompt=prompt, output=output))
            shifted = (u - NEAR, u, u + NEAR)
            possible |= {int(np.searchsorted(reached, at, side="right")) for at in shifted}
    return tokens <= possible


def border_swapped(
    logits: npt.NDArray[np.float32], chances: npt.NDArray[np.float64], temperature: float
) -> npt.NDArray[np.float32]:
    """The lightest token that stays and the heaviest that goes trade places, if they weigh the same."""
    stays, goes = np.flatnonzero(chances > 0), np.flatnonzero(chances == 0)
    if not len(goes):
        return logits
    lightest, heaviest = stays[np.argmin(chances[stays])], goes[np.argmax(logits[goes])]
    if abs(float(logits[lightest]) - float(logits[heaviest])) > NEAR * temperature:
        return logits
    swapped = logits.copy()
    swapped[[lightest, heaviest]] = logits[[heaviest, lightest]]
    return swapped


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("size", "steps"), [(700, 12), (3_000, 8), (32_000, 2)])
def test_both_forms_give_the_same_tokens(shape: str, size: int, steps: int) -> None:
    random = np.random.default_rng([size, *shape.encode()])
    params = [any_params(random) for _ in range(ROWS)]
    prompts = [random.integers(0, size, 12) for _ in range(ROWS)]
    host, device = NumpySampler(size), TorchSampler(size, lanes=ROWS)
    ours, theirs = (
        [
            form.row(asked, prompt, min_tokens=3, eos_token_ids=(0, 5), logprobs=True)
            for asked, prompt in zip(params, prompts, strict=True)
        ]
        for form in (host, device)
    )
    outputs: list[list[int]] = [[] for _ in range(ROWS)]
    different = 0
    for _ in range(steps):
        logits = shaped(shape, size, random)
        expected, found = host.sample(logits, ours), device.sample(logits, theirs)
        assert found.failures == expected.failures == {}
        assert expected.logprobs is not None
        assert found.logprobs is not None
        for i in range(ROWS):
            both = {int(expected.tokens[i]), int(found.tokens[i])}
            if len(both) > 1:
                different += 1
                told = {"prompt": prompts[i].tolist(), "output": outputs[i]}
                masked = logits[i].copy()
                masked[[0, 5]] = -np.inf if len(outputs[i]) < 3 else masked[[0, 5]]
                assert undecided(masked, params[i], ours[i].position, both, **told)
            else:
                assert found.logprobs[i] == pytest.approx(expected.logprobs[i], abs=2e-5)
            outputs[i].append(int(expected.tokens[i]))
            ours[i].accept(outputs[i][-1])
            theirs[i].accept(outputs[i][-1])
    assert different <= ROWS * steps / 500


def test_a_difference_that_is_no_near_tie_would_be_seen() -> None:
    logits = np.array([0.0, 0.5, 1.0, 1.5], np.float32)
    params = SamplingParams(temperature=1.0, seed=3)
    nothing = {"prompt": [], "output": []}
    drawable = [undecided(logits, params, 4, {token}, **nothing) for token in range(4)]
    assert sum(drawable) == 1
    assert not undecided(logits, params, 4, {0, 3}, **nothing)


def test_a_row_goes_on_with_the_other_form() -> None:
    """A swap may bring an engine whose logits lie elsewhere: its sampler takes the rows as they are."""
    size, random = 900, np.random.default_rng(4)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=9)
    logits = random.normal(scale=1.5, size=(12, 1, size)).astype(np.float32)
    prompt = random.integers(0, size, 30)

    def run(*forms: NumpySampler | TorchSampler) -> list[int]:
        row, tokens = forms[0].row(params, prompt), []
        for step, values in enumerate(logits):
            tokens.append(int(forms[step * len(forms) // len(logits)].sample(values, [row]).tokens[0]))
            row.accept(tokens[-1])
        return tokens

    alone = run(NumpySampler(size))
    assert run(NumpySampler(size), TorchSampler(size), TorchSampler(size)) == alone
    assert run(TorchSampler(size), NumpySampler(size)) == alone


def test_results_are_plain_numpy() -> None:
    sampled = TorchSampler(8).sample(np.zeros((0, 8), np.float32), [])
    assert sampled.tokens.dtype == np.int64
    row = TorchSampler(8).row(SamplingParams(), np.zeros(1, np.int64), logprobs=True)
    sampled = TorchSampler(8).sample(np.zeros((1, 8), np.float32), [row])
    assert (sampled.tokens.dtype, sampled.logprobs.dtype) == (np.int64, np.float32)  # type: ignore[union-attr]
