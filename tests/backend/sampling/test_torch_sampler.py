"""What only the form on a device promises: only the end waits, histories follow, trouble fails rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend.generation import SamplingParams
from backend.sampling import NumpySampler, TorchSampler
from backend.sampling import torch_sampler as module
from backend.sampling.device_plan import DevicePlan

SIZE = 1500
PROMPT = np.arange(40, dtype=np.int64)
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "bincount",
    "repeat_interleave",
    "is_nonzero",
)
EVERYTHING = SamplingParams(
    temperature=0.8, top_k=300, top_p=0.9, min_p=0.001, repetition_penalty=1.2, presence_penalty=0.1, seed=5
)


class Heard(TorchDispatchMode):
    """Writes down every operation of torch, with the shapes that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [str(tuple(one.shape)) for one in args if isinstance(one, torch.Tensor)]
        self.operations.append((str(func), *shapes))
        return func(*args, **(kwargs or {}))


def logits_of(kind: str, rows: int = 4) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(3)
    logits = random.normal(size=(rows, SIZE)).astype(np.float32)
    if kind == "equal":
        logits[:] = 0
    elif kind == "certain":
        logits[:, 7] = 90
    elif kind == "broken":
        logits[0, 3], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    return logits


def test_what_is_enqueued_does_not_depend_on_data_and_nothing_of_it_waits() -> None:
    everything = np.full((4, -(-SIZE // 32)), -1, np.int32)
    heard = []
    for kind in ("spread", "equal", "certain", "broken"):
        sampler = TorchSampler(SIZE, lanes=4)
        rows = [
            sampler.row(EVERYTHING, PROMPT, min_tokens=2, eos_token_ids=(0, 1), logprobs=True)
            for _ in range(4)
        ]
        with Heard() as step:
            sampler.sample(logits_of(kind), rows, allowed_mask=everything)
        heard.append(step.operations)
    assert heard[0] == heard[1] == heard[2] == heard[3]
    waiting = [name for name, *_ in heard[0] if any(wait in name for wait in WAITS)]
    assert waiting == []
    indexed_by_flags = [name for name, *_ in heard[0] if name.startswith(("aten.index.", "aten.index_put"))]
    assert indexed_by_flags == [], "an index that may be boolean has a size only the device knows"


def test_heard_would_hear_a_wait() -> None:
    with Heard() as step:
        float(torch.ones(3).sum())
        torch.ones(3).nonzero()
    assert [name for name, *_ in step.operations if any(wait in name for wait in WAITS)] != []


def test_a_step_takes_no_large_memory_that_it_does_not_keep() -> None:
    """Operations that make a new tensor of a vocabulary per row: only what expands a mask."""
    sampler = TorchSampler(SIZE, lanes=4)
    rows = [sampler.row(EVERYTHING, PROMPT, logprobs=True) for _ in range(4)]
    made: list[str] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
            out = (kwargs or {}).get("out")
            known |= {out.untyped_storage().data_ptr()} if out is not None else set()
            for one in result if isinstance(result, tuple) else (result,):
                new = isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in known
                if new and one.numel() >= 4 * SIZE and not str(func).startswith("aten.le."):
                    made.append(str(func))
            return result

    logits = logits_of("spread")
    sampler.sample(logits, rows)
    with Sizes():
        sampler.sample(logits, rows)
    assert made == []


def test_one_column_per_token_goes_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = TorchSampler(SIZE, lanes=4)
    shipped: list[int] = []
    ship = sampler._asked.ship

    def counting(parts: Any) -> Any:
        shipped.append(sum(part.size for part in parts))
        return ship(parts)

    monkeypatch.setattr(sampler._asked, "ship", counting)
    rows = [sampler.row(EVERYTHING, PROMPT) for _ in range(4)]
    for _ in range(3):
        for row, token in zip(rows, sampler.sample(logits_of("spread"), rows).tokens, strict=True):
            row.accept(int(token))
    first, *later = shipped
    assert first > 4 * 3 * len(PROMPT)
    assert later == [4 * (5 + 2 + 3 + 3)] * 2  # parameters, where, rates; and cell, id, count of one column


@pytest.mark.parametrize("order", ["interleaved", "behind"])
def test_histories_follow_their_rows_through_any_order_of_calls(order: str) -> None:
    """Rows come and go, alone and together, with no token or several between two calls."""
    random = np.random.default_rng(8)
    host, device = NumpySampler(SIZE), TorchSampler(SIZE, lanes=2)

    def pair(number: int) -> tuple[Any, Any]:
        params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3)
        prompt = random.integers(0, SIZE, 1 + 37 * number % 400)
        return host.row(params, prompt), device.row(params, prompt)

    live = [pair(number) for number in range(3)]
    for step in range(60):
        some = [live[i] for i in random.permutation(len(live))[: 1 + step % len(live)]]
        logits = random.normal(scale=0.3, size=(len(some), SIZE)).astype(np.float32)
        expected = host.sample(logits, [one for one, _ in some]).tokens
        assert device.sample(logits, [other for _, other in some]).tokens.tolist() == expected.tolist()
        accepted = 1 if order == "interleaved" else int(random.integers(0, 4))
        for ours, theirs in some:
            for token in random.integers(0, SIZE, accepted):
                ours.accept(int(token))
                theirs.accept(int(token))
        if step % 4 == 0:
            live.append(pair(step))
        if step % 7 == 0:
            live.pop(0)
    assert len(live) > 8


def test_slots_of_forgotten_rows_are_used_again() -> None:
    sampler = TorchSampler(SIZE, lanes=2)
    for _ in range(50):
        rows = [sampler.row(EVERYTHING, PROMPT) for _ in range(4)]
        sampler.sample(logits_of("spread"), rows)
    assert len(sampler._histories._ids) == 8


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), torch.AcceleratorError("illegal address")]
)
def test_an_error_of_the_device_fails_the_rows_and_not_the_loop(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, twin = TorchSampler(SIZE, lanes=4), TorchSampler(SIZE, lanes=4)
    rows, others = ([one.row(EVERYTHING, PROMPT) for _ in range(4)] for one in (sampler, twin))
    logits = logits_of("spread")
    assert sampler.sample(logits, rows).tokens.tolist() == twin.sample(logits, others).tokens.tolist()

    def accept(token: int) -> None:
        for row in (*rows, *others):
            row.accept(token)

    accept(11)
    with monkeypatch.context() as patch:
        patch.setattr(sampler._slab, "draw", lambda u: _raise(error))
        sampled = sampler.sample(logits, rows)
    assert list(sampled.failures) == [0, 1, 2, 3]
    assert "sampling on cpu failed" in str(sampled.failures[0])
    assert sampled.tokens.tolist() == [-1] * 4
    accept(12)
    assert sampler.sample(logits, rows).tokens.tolist() == twin.sample(logits, others).tokens.tolist()


def _raise(error: Exception) -> None:
    raise error


def test_warm_up_uses_everything_that_a_step_may_use() -> None:
    def names(run: Callable[[TorchSampler], object]) -> set[str]:
        sampler = TorchSampler(SIZE, lanes=4)
        with Heard() as heard:
            run(sampler)
        return {name for name, *_ in heard.operations}

    mask = np.full((1, -(-SIZE // 32)), -1, np.int32)

    def step(sampler: TorchSampler) -> None:
        row = sampler.row(EVERYTHING, PROMPT, min_tokens=1, eos_token_ids=(3,), logprobs=True)
        sampler.sample(logits_of("spread", rows=1), [row], allowed_mask=mask)

    of_host_logits = {"aten.lift_fresh.default", "aten.to.device"}
    assert names(step) - of_host_logits <= names(TorchSampler.warm_up)


def test_memory_is_known_before_it_is_taken() -> None:
    for size, lanes in ((SIZE, 4), (128_256, 1)):
        slab = TorchSampler(size, lanes=lanes)._slab
        taken = sum(one.nbytes for one in vars(slab).values() if isinstance(one, torch.Tensor))
        assert module.device_bytes(size, lanes) == pytest.approx(taken, rel=0.001)
    assert module.device_bytes(128_256, 512) < 100 << 20


@pytest.mark.parametrize("min_p", [0.0, 1.0, 0.1, 0.3, 0.7, 0.9, 1e-3, 0.5])
def test_min_p_in_float32_decides_as_the_number_that_was_asked_for(min_p: float) -> None:
    row = TorchSampler(SIZE).row(SamplingParams(temperature=1.0, min_p=min_p), PROMPT)
    *_, rounded = (float(one[0]) for one in DevicePlan.of([row], SIZE).parameters)
    near = np.float32(min_p)
    for weight in (np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(2))):
        assert (float(weight) >= min_p) == (float(weight) >= rounded)
