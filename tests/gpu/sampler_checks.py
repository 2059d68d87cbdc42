"""What a sampler must do with an engine's logits where they lie; each check returns a line of what it found.

The tests of this folder run them on a GPU node with logits in device memory, `tests/rig/test_gpu_sampling.py`
runs them in small on the host and proves with mutants that they can fail.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from backend.generation import SamplingParams
from backend.sampling import NumpySampler, Sampled, Sampler, SamplerRow, TorchSampler
from engines.contract import Engine, LaneId, Logits, shares_kv
from tests.backend.sampling.test_agreement import undecided
from tests.engines.behaviours import some_tokens

Floats = npt.NDArray[np.float32]
Place = Callable[[Floats], Any]
"""Puts values where the sampler looks for logits."""

EOS = (0, 2)
MIN_TOKENS = 3
ANY = SamplingParams(temperature=1.0, seed=1)
KINDS = {
    "greedy": SamplingParams(),
    "temperature": ANY,
    "top-k": SamplingParams(temperature=0.8, top_k=40, seed=2),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9, seed=3),
    "a narrow top-p": SamplingParams(temperature=1.5, top_p=0.1, seed=4),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05, seed=5),
    "every filter": SamplingParams(temperature=1.2, top_k=300, top_p=0.95, min_p=0.01, seed=6),
    "penalties": SamplingParams(
        temperature=0.9, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4,
        seed=7,
    ),
    "greedy with penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3),
}  # fmt: skip
_LOGPROB = 2e-5


MakeSampler = Callable[[Engine], Sampler]


def device_sampler(engine: Engine, device: str = "cuda:0") -> TorchSampler:
    """A new one for an engine, as the backend makes it."""
    spec = engine.spec
    sampler = TorchSampler(spec.geometry.vocab_size, lanes=spec.lanes, device=device)
    sampler.warm_up()
    return sampler


def forms_agree(engine: Engine, sampler: Sampler, *, steps: int = 6, rounds: int = 3) -> str:
    """Tokens and logprobs of every kind of row against the numpy form's, on the very logits of decodes.

    Tokens may differ where float32 cannot decide (see `undecided`), logprobs by its rounding.
    """
    vocab, lanes = engine.spec.geometry.vocab_size, range(engine.spec.lanes)
    host, random = NumpySampler(vocab), np.random.default_rng(11)
    kinds = [*KINDS.items()] * rounds
    compared = different = 0
    for first in range(0, len(kinds), len(lanes)):
        some = [
            (name, msgspec.structs.replace(params, seed=params.seed + 100 * first))
            for name, params in kinds[first : first + len(lanes)]
        ]
        prompts = [some_tokens(engine, 20, seed=first + lane) for lane in range(len(some))]
        for lane, prompt in enumerate(prompts):
            engine.prefill(LaneId(lane), prompt[:-1], 0)
        ours, theirs = (
            [
                form.row(params, prompt, min_tokens=MIN_TOKENS, eos_token_ids=EOS, logprobs=True)
                for (_, params), prompt in zip(some, prompts, strict=True)
            ]
            for form in (host, sampler)
        )
        said = [list(map(int, prompt)) for prompt in prompts]
        for step in range(steps):
            tokens = np.array([line[-1] for line in said], np.int64)
            positions = np.array([len(line) - 1 for line in said], np.int64)
            array = engine.decode([LaneId(lane) for lane in range(len(some))], tokens, positions).array
            mask = _mask(random, len(some), vocab) if step % 2 else None
            found = sampler.sample(array, theirs, allowed_mask=mask)
            values = np.array(np.asarray(array))  # after it: a copy to the host waits for the step
            expected = host.sample(values, ours, allowed_mask=mask)
            assert found.failures == expected.failures == {}, f"rows failed: {found.failures}"
            for row, (name, params) in enumerate(some):
                compared += 1
                pair = {int(found.tokens[row]), int(expected.tokens[row])}
                if len(pair) == 1:
                    _same_logprob(found, expected, row, name)
                    continue
                different += 1
                left = _allowed(values[row], mask, row, must_go_on=step < MIN_TOKENS)
                told = {"prompt": said[row][:20], "output": said[row][20:]}
                assert params.temperature > 0, f"{name}, step {step}: tokens {pair}, and nothing is drawn"
                assert undecided(left, params, ours[row].position, pair, **told), (
                    f"{name}, step {step}: token {found.tokens[row]}, in numpy {expected.tokens[row]}"
                )
            for row, token in enumerate(expected.tokens.tolist()):
                said[row].append(token)
                ours[row].accept(token)
                theirs[row].accept(token)
    assert different <= max(1, compared // 50), f"{different} of {compared} tokens differ"
    return f"{compared} tokens of {len(KINDS)} kinds of row, {different} differ where rounding decides"


def rows_are_on_their_own(values: Floats, sampler: Sampler, *, place: Place) -> str:
    """Every row alone, and all of them in another order: bit for bit what it says among the others."""
    params, count = _cycled(len(values)), len(values)
    together = _sample(sampler, place(values), params)
    turned = [*reversed(range(count))]
    backwards = _sample(sampler, place(values[turned]), [params[i] for i in turned], seeds=turned)
    for row in range(count):
        alone = _sample(sampler, place(values[row : row + 1]), params[row : row + 1], seeds=[row])
        for other, at in ((alone, 0), (backwards, turned.index(row))):
            assert _bits(together, row) == _bits(other, at), f"row {row} depends on the rows beside it"
    return f"{count} rows alone and in another order, the same bits"


def spoiled_rows_fail_alone(values: Floats, sampler: Sampler, *, place: Place) -> str:
    """NaN, +inf or nothing at all in a row fails that row; the others say what they would have said."""
    params = _cycled(len(values))
    well = _sample(sampler, place(values), params)
    assert not well.failures, f"rows failed: {well.failures}"
    for name, value in (("NaN", np.nan), ("+inf", np.inf), ("−inf everywhere", -np.inf)):
        for row in range(len(values)):
            spoiled = values.copy()
            spoiled[row, slice(None) if value == -np.inf else -1] = value
            found = _sample(sampler, place(spoiled), params)
            assert [*found.failures] == [row], f"{name} in row {row} failed rows {[*found.failures]}"
            assert found.tokens[row] == -1, f"{name} in row {row} gave token {found.tokens[row]}"
            for other in set(range(len(values))) - {row}:
                assert _bits(found, other) == _bits(well, other), f"{name} in row {row} changed row {other}"
    return f"NaN, +inf and −inf in each of {len(values)} rows"


def sampled_swaps(
    open_next: Callable[[int, Engine | None], Engine], make: MakeSampler
) -> Callable[[int, Engine | None], Engine]:
    """`open_next`, each engine sampled from, as in service: a sampler goes on with lanes that are taken
    over.
    """
    kept: list[Sampler] = []

    def opened(number: int, serving: Engine | None) -> Engine:
        engine = open_next(number, serving)
        if serving is None or not shares_kv(engine.spec, serving.spec):
            kept[:] = [make(engine)]
        row = kept[0].row(KINDS["penalties"], some_tokens(engine, 4), logprobs=True)
        for start in range(4):
            logits = engine.prefill(LaneId(0), some_tokens(engine, 4)[start : start + 1], start)
            sampled = kept[0].sample(logits.array, [row])
            assert not sampled.failures, f"engine {number}: {sampled.failures}"
            row.accept(int(sampled.tokens[0]))
        return engine

    return opened


def some_logits(engine: Engine) -> tuple[Floats, Logits]:
    """Logits of a decode over all lanes: a copy on the host, and as the engine gives them."""
    lanes = [LaneId(lane) for lane in range(engine.spec.lanes)]
    for lane in lanes:
        engine.prefill(lane, some_tokens(engine, 9 + lane, seed=lane), 0)
    logits = engine.decode(lanes, np.arange(1, len(lanes) + 1), 9 + np.arange(len(lanes)))
    return np.array(np.asarray(logits.array)), logits


def _cycled(count: int) -> list[SamplingParams]:
    kinds = [*KINDS.values()]
    return [kinds[row % len(kinds)] for row in range(count)]


def _sample(
    sampler: Sampler, logits: Any, params: Sequence[SamplingParams], *, seeds: Sequence[int] | None = None
) -> Sampled:
    """Rows with some history; `seeds` is which prompt each has."""
    rows: list[SamplerRow] = []
    for seed, asked in zip(seeds or range(len(params)), params, strict=True):
        row = sampler.row(asked, np.arange(seed, seed + 8), logprobs=True)
        row.accept(seed + 1)
        rows.append(row)
    return sampler.sample(logits, rows)


def _bits(sampled: Sampled, row: int) -> tuple[int, bytes]:
    assert sampled.logprobs is not None
    return int(sampled.tokens[row]), sampled.logprobs[row].tobytes()


def _same_logprob(found: Sampled, expected: Sampled, row: int, name: str) -> None:
    assert found.logprobs is not None
    assert expected.logprobs is not None
    off = abs(float(found.logprobs[row]) - float(expected.logprobs[row]))
    assert off <= _LOGPROB, f"{name}: logprob differs by {off:.1e}"


def _mask(random: np.random.Generator, rows: int, vocab: int) -> npt.NDArray[np.int32]:
    """Half of all tokens, others in each row."""
    words = random.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32)
    return words.view(np.int32)


def _allowed(values: Floats, mask: npt.NDArray[np.int32] | None, row: int, *, must_go_on: bool) -> Floats:
    left = values.copy()
    if mask is not None:
        bits = np.unpackbits(mask[row].view(np.uint8), bitorder="little")[: len(left)]
        left[bits == 0] = -np.inf
    if must_go_on:
        left[[*EOS]] = -np.inf
    return left
