"""Sampling stays a small part of a step: bounds on the CPU time of the best run, on a shared machine."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from backend.generation import SamplingParams
from backend.sampling import NumpySampler
from engines import Engine, LaneId

TEXT = (
    "The prefix cache keeps key and value tensors of earlier prompts, so that a second request with the same "
    "start does not compute them again. In the morning the fisherman walked down to the harbour again."
)


@pytest.fixture(scope="module")
def real_logits(demo_release: Path, engine: Callable[..., Engine]) -> npt.NDArray[np.float32]:
    """SmolLM2's logits [32, V] at 32 places of an English text."""
    tokenizer = Tokenizer.from_str((demo_release / "tokenizer.json").read_text())
    ids = np.array(tokenizer.encode(TEXT).ids[:33], np.int64)
    opened = engine(demo_release, lanes=1)
    rows = [opened.prefill(LaneId(0), ids[i : i + 1], i).array[0].copy() for i in range(len(ids))]
    return np.array(rows[1:])


def best_ms(logits: npt.NDArray[np.float32], params: SamplingParams, *, repeat: int = 30) -> float:
    sampler = NumpySampler(logits.shape[1])
    rows = [sampler.row(params, np.array([0])) for _ in logits]
    times = []
    for _ in range(repeat):
        start = time.thread_time()
        sampler.sample(logits, rows)
        times.append(time.thread_time() - start)
    return min(times) * 1e3


def test_real_logits_of_32_lanes(real_logits: npt.NDArray[np.float32]) -> None:
    assert best_ms(real_logits, SamplingParams(temperature=1.0, top_p=0.9)) <= 5


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0])
def test_flat_logits_of_32_lanes(scale: float) -> None:
    logits = np.random.default_rng(0).normal(scale=scale, size=(32, 49_152)).astype(np.float32)
    assert best_ms(logits, SamplingParams(temperature=1.0, top_p=0.9), repeat=10) <= 25


def test_greedy_8_lanes(real_logits: npt.NDArray[np.float32]) -> None:
    assert best_ms(real_logits[:8], SamplingParams()) <= 0.3


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)])
def test_64_lanes_of_32_tokens(params: SamplingParams) -> None:
    logits = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    assert best_ms(logits, params, repeat=200) <= 0.2
