"""The sampled distribution is exactly the reference's: uniforms on a grid instead of statistics.

A token is drawn for one interval of uniforms, so over an even grid of N of them its count is N·p within one.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from backend.generation import SamplingParams
from tests.backend.sampling.conftest import FORMS
from tests.backend.sampling.reference import distribution

GRIDS = {"numpy": 512, "torch": 64}  # the form on tensors takes longer on a CPU
every_form = pytest.mark.parametrize("form", GRIDS)


def drawn(
    form: str,
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    *,
    prompt: list[int],
    output: list[int],
) -> npt.NDArray[np.float64]:
    """Share of each token over an even grid of uniforms."""
    size = GRIDS[form]
    grid = (np.arange(size) + 0.5) / size
    sampler = FORMS[form](len(logits), uniforms=lambda seeds, positions: grid)
    rows = [sampler.row(params, np.array(prompt, np.int64)) for _ in range(size)]
    for token in output:
        for row in rows:
            row.accept(token)
    sampled = sampler.sample(np.tile(logits, (size, 1)), rows)
    assert not sampled.failures
    return np.bincount(sampled.tokens, minlength=len(logits)) / size


def assert_same(form: str, shares: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> None:
    assert not shares[expected == 0].any(), "a token that the filters remove was drawn"
    assert np.abs(shares - expected).max() <= 1.001 / GRIDS[form] + 1e-5


def steps(sharpness: float, size: int, seed: int, levels: int) -> npt.NDArray[np.float32]:
    """Random logits on a lattice: what float64 tells apart, float32 does too; with few levels many tie."""
    values = np.random.default_rng(seed).normal(scale=sharpness, size=size)
    return (np.round(values * levels) / levels).astype(np.float32)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 40, 900, 1500])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.97, 0.9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.75])),
    )


anything = given(
    params=params(),
    size=st.sampled_from([2, 32, 1024, 1025, 3000, 6000]),
    sharpness=st.sampled_from([0.0, 0.01, 1.0, 2.0, 12.0]),
    levels=st.sampled_from([1, 64, 2**12]),
    seed=st.integers(0, 2**32 - 1),
    forbidden=st.sampled_from([0, 0, 1, 20]),
)


@settings(max_examples=120, deadline=None)
@anything
def test_equals_a_plain_reference(**drawn_case: Any) -> None:
    check_against_the_reference("numpy", **drawn_case)


@settings(max_examples=120, deadline=None)
@anything
def test_on_tensors_equals_a_plain_reference(**drawn_case: Any) -> None:
    check_against_the_reference("torch", **drawn_case)


def check_against_the_reference(
    form: str,
    params: SamplingParams,
    size: int,
    sharpness: float,
    levels: int,
    seed: int,
    forbidden: int,
) -> None:
    logits = steps(sharpness, size, seed, levels)
    random = np.random.default_rng(seed)
    logits[random.integers(0, size, min(forbidden, size - 1))] = -np.inf
    prompt, output = random.integers(0, size, 9).tolist(), random.integers(0, size, 5).tolist()
    expected = distribution(logits, params, prompt=prompt, output=output)
    for nudge in (
        1 - 3e-6,
        1 + 3e-6,
    ):  # where float32 cannot decide on one token more or less, neither is wrong
        near = SamplingParams(
            **{
                name: getattr(params, name)
                for name in params.__struct_fields__
                if name not in ("top_p", "min_p")
            },
            top_p=params.top_p if params.top_p == 1 else params.top_p * nudge,
            min_p=params.min_p if params.min_p in (0, 1) else params.min_p * nudge,
        )
        near_by = distribution(logits, near, prompt=prompt, output=output)
        assume(np.array_equal(near_by > 0, expected > 0))
    assert_same(form, drawn(form, logits, params, prompt=prompt, output=output), expected)


@every_form
@pytest.mark.parametrize(
    ("size", "sharpness", "levels", "params"),
    [
        # fewer candidates than top_k, while top-p is over the mass that top-k leaves
        (3000, 2.0, 64, SamplingParams(temperature=1.0, top_k=900, top_p=0.5)),
        # ties at the edge, in a vocabulary that is drawn without a sort
        (6000, 0.0, 1, SamplingParams(temperature=1.0, top_p=0.5)),
        (6000, 0.0, 1, SamplingParams(temperature=1.0, top_k=4500)),
        (6000, 1.0, 2, SamplingParams(temperature=4.0, top_k=4500, top_p=0.7, min_p=0.4)),
        (6000, 0.2, 4096, SamplingParams(temperature=1.0, top_p=0.3)),
    ],
)
def test_equals_a_plain_reference_in_corners(
    form: str, size: int, sharpness: float, levels: int, params: SamplingParams
) -> None:
    logits = steps(sharpness, size, 1, levels)
    expected = distribution(logits, params, prompt=[], output=[])
    assert_same(form, drawn(form, logits, params, prompt=[], output=[]), expected)


@every_form
@pytest.mark.parametrize("size", [300, 5000])
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.9, 0.0), (50, 1.0, 0.0), (2000, 0.8, 0.0), (30, 0.7, 0.2), (0, 1.0, 0.1)],
)
def test_equals_hugging_face_warpers(
    form: str, size: int, sharpness: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(size).normal(scale=sharpness, size=size).astype(np.float32)
    prompt = list(range(0, size, 7))
    warpers = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.8)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    scores = warpers(torch.tensor([prompt]), torch.from_numpy(logits.astype(np.float64))[None])
    expected = torch.softmax(scores, dim=-1)[0].numpy()
    asked = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=1.2)
    assert_same(form, drawn(form, logits, asked, prompt=prompt, output=[]), expected)


@every_form
def test_seeds_draw_from_that_distribution(form: str) -> None:
    logits = np.array([1.0, 0.0, 2.0, -1.0, 0.5, -np.inf], np.float32)
    asked = SamplingParams(temperature=1.0)
    expected = distribution(logits, asked, prompt=[], output=[])
    sampler = FORMS[form](len(logits))
    counts = np.zeros(len(logits))
    rows = [sampler.row(SamplingParams(temperature=1.0, seed=seed), np.array([0])) for seed in range(400)]
    for _ in range(25):
        tokens = sampler.sample(np.tile(logits, (400, 1)), rows).tokens
        counts += np.bincount(tokens, minlength=len(logits))
        for row, token in zip(rows, tokens, strict=True):
            row.accept(int(token))
    wanted = expected * counts.sum()
    assert counts[-1] == 0
    assert ((counts - wanted)[:-1] ** 2 / wanted[:-1]).sum() < 18.5  # chi-square, 4 degrees, p = 0.001
