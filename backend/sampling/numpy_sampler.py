"""The sampler for logits in host memory: greedy and filtered sampling, vectorised over rows, in numpy alone.

Large vocabularies are cut first: one pass makes the weights of a row, and only tokens heavier than a floor
are sorted. Where the filters keep more than those (flat logits), the row is drawn from the whole vocabulary
by histogram. Both are exact.

Bits: a row takes the same path and the same operations on its own data whatever the other rows are. Its
randomness is one uniform from Philox(seed, position). Threads: one owner.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backend.errors import EngineFailed
from backend.generation import SamplingParams
from backend.sampling.contract import BROKEN, NOTHING_ALLOWED, Sampled, SamplerRow
from backend.sampling.nucleus import Filters, Floats, Ints, RowFilters, draw_candidates, draw_wide
from backend.sampling.philox import uniforms as philox_uniforms
from backend.sampling.rows import SequenceRow
from engines import DeviceLostError, EngineError

SMALL_VOCABULARY: Final = 1024
"""Up to here every token is a candidate, and no row is cut."""

MAX_CANDIDATES: Final = 4096
SHARED_CANDIDATES: Final = 512
FLOORS: Final = tuple(
    tuple(float(np.exp(np.float32(-depth))) for depth in depths)
    for depths in ((3, 4, 5, 6, 7, 8, 9), (11, 13, 15), (18, 21, 24))
)
"""Candidates weigh more than this times the heaviest token; the next is tried where filters keep more.

One pass over the vocabulary serves a group of floors; few rows need a second (top-k of a very peaked row).
"""

Logits = npt.NDArray[np.float32]
Uniforms = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64]], Floats]


@dataclass(frozen=True, slots=True)
class _Draws:
    """The rows that draw (are not greedy) and their parameters; one entry per such row."""

    index: Ints
    rows: list[SequenceRow]
    scale: npt.NDArray[np.float32]
    filters: Filters
    seeds: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, rows: Sequence[SequenceRow], index: Sequence[int], vocab_size: int) -> "_Draws":
        """Collect the parameters of rows[i] for i in `index`."""
        own = [rows[i] for i in index]
        params = [row.params for row in own]
        filters = Filters(
            top_k=np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
        )
        scale = np.array([1 / p.temperature for p in params], dtype=np.float32)
        seeds = np.array([p.seed for p in params], dtype=np.uint64)
        return cls(np.array(index, dtype=np.int64), own, scale, filters, seeds)

    def positions(self) -> npt.NDArray[np.uint64]:
        """The position of every row."""
        return np.array([row.position for row in self.rows], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What stays the same while the same rows come again: which of them need what."""

    rows: list[SequenceRow]
    adjusting: list[int]
    wanting_logprobs: list[int]
    draws: _Draws


class NumpySampler:
    """Sampler over numpy arrays; `vocab_size` is V of every step."""

    def __init__(self, vocab_size: int, *, uniforms: Uniforms = philox_uniforms) -> None:
        """`uniforms` makes the randomness: one double in [0, 1) for each (seed, position)."""
        self._vocab_size = vocab_size
        self._uniforms = uniforms
        self._scratch = np.empty(vocab_size, dtype=np.float32)
        self._plan = self._make_plan([])

    def row(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        *,
        min_tokens: int = 0,
        eos_token_ids: Collection[int] = (),
        logprobs: bool = False,
    ) -> SequenceRow:
        """Start a sequence (see Sampler.row)."""
        return SequenceRow(
            params, prompt, min_tokens=min_tokens, eos_token_ids=eos_token_ids, logprobs=logprobs
        )

    def sample(
        self, logits: Any, rows: Sequence[SamplerRow], *, allowed_mask: npt.NDArray[np.int32] | None = None
    ) -> Sampled:
        """Choose a token for every row of `logits` float32 [n, V] (see Sampler.sample).

        Logits of a device come over by their `__array__`, all V of them for every row; where the step that
        wrote them turns out to have failed, every row does. DeviceLostError, after which nothing else works.
        """
        plan = self._plan_of(rows)
        try:
            logits = np.asarray(logits)
        except DeviceLostError:
            raise
        except EngineError as error:
            return Sampled.nothing(len(rows), because=EngineFailed(f"engine failed: {error}"))
        assert logits.shape == (len(plan.rows), self._vocab_size)
        assert logits.dtype == np.float32
        with np.errstate(over="ignore", invalid="ignore"):  # −inf and huge logits are legal
            tokens, peaks = _heaviest(logits)
            failures = {int(i): EngineFailed(BROKEN) for i in np.flatnonzero(~np.isfinite(peaks))}
            adjusted = _adjusted(logits, plan, allowed_mask)
            if adjusted is not logits:
                tokens, peaks = _heaviest(adjusted)
                for i in np.flatnonzero(~np.isfinite(peaks)):
                    failures.setdefault(int(i), EngineFailed(NOTHING_ALLOWED))
            if plan.draws.rows:
                draws = _without(plan, failures, self._vocab_size) if failures else plan.draws
                tokens[draws.index] = self._draw(adjusted, peaks, draws)
            if failures:
                tokens[list(failures)] = -1
            return Sampled(tokens, _logprobs(logits, tokens, plan.wanting_logprobs), failures)

    def _plan_of(self, rows: Sequence[SamplerRow]) -> _Plan:
        if list(rows) != self._plan.rows:
            self._plan = self._make_plan(rows)
        return self._plan

    def _make_plan(self, rows: Sequence[SamplerRow]) -> _Plan:
        own = [row for row in rows if isinstance(row, SequenceRow)]
        assert len(own) == len(rows), "rows were made by another sampler"
        return _Plan(
            rows=own,
            adjusting=[i for i, row in enumerate(own) if row.adjusts],
            wanting_logprobs=[i for i, row in enumerate(own) if row.logprobs],
            draws=_Draws.of(own, [i for i, row in enumerate(own) if not row.greedy], self._vocab_size),
        )

    def _draw(self, logits: Logits, peaks: Logits, draws: _Draws) -> Ints:
        """One token for each row of `draws`."""
        if not draws.rows:
            return draws.index
        u = self._uniforms(draws.seeds, draws.positions())
        if self._vocab_size > SMALL_VOCABULARY:
            return self._draw_cut(logits, peaks, draws, u)
        weights = np.exp((logits[draws.index] - peaks[draws.index, None]) * draws.scale[:, None])
        return draw_candidates(weights.astype(np.float64), filters=draws.filters, u=u)

    def _draw_cut(self, logits: Logits, peaks: Logits, draws: _Draws, u: Floats) -> Ints:
        """Cut every row to its candidates; rows whose filters keep more draw from the whole vocabulary."""
        tokens = np.empty(len(draws.index), dtype=np.int64)
        cuts: dict[int, _Cut] = {}
        weights = self._scratch
        for j, i in enumerate(draws.index.tolist()):
            np.subtract(logits[i], peaks[i], out=weights)
            np.multiply(weights, draws.scale[j], out=weights)
            np.exp(weights, out=weights)
            filters = draws.filters.of(j)
            cut = None if filters.keep_all(self._vocab_size) else _cut(weights, filters)
            if cut is None:
                tokens[j] = draw_wide(weights, filters, u=float(u[j]))
            else:
                cuts[j] = cut
        for group in _groups(cuts):
            own = [cuts[j] for j in group]
            padded = np.zeros((len(own), max(len(cut.ids) for cut in own)))
            for row, cut in zip(padded, own, strict=True):
                row[: len(cut.ids)] = cut.weights
            totals = np.array([cut.total for cut in own])
            columns = draw_candidates(padded, filters=draws.filters.take(group), u=u[group], totals=totals)
            tokens[group] = [cut.ids[column] for cut, column in zip(own, columns, strict=True)]
        return tokens


@dataclass(frozen=True, slots=True)
class _Cut:
    """The candidates of a row in order of id, and the mass of its whole vocabulary."""

    ids: Ints
    weights: Floats
    total: float


def _cut(weights: Logits, filters: RowFilters) -> _Cut | None:
    """The fewest candidates that settle the row; None if they are too many to be worth sorting."""
    total = 0.0
    for floors in FLOORS:
        heavy = weights > floors[-1]
        if np.count_nonzero(heavy) > MAX_CANDIDATES:
            break
        total = total or float(weights.sum(dtype=np.float64))
        ids = np.flatnonzero(heavy)
        candidates = weights[ids].astype(np.float64)
        for floor in floors:
            above = candidates > floor
            own = candidates[above]
            if filters.settled_by(own, total, floor=floor, vocab_size=len(weights)):
                return _Cut(ids[above], own, total)
    return None


def _groups(cuts: dict[int, _Cut]) -> list[list[int]]:
    """Rows to draw together: the small ones share a matrix, a large one would only widen it."""
    small = [j for j, cut in cuts.items() if len(cut.ids) <= SHARED_CANDIDATES]
    groups = [[j] for j, cut in cuts.items() if len(cut.ids) > SHARED_CANDIDATES]
    return [small, *groups] if small else groups


def _heaviest(logits: Logits) -> tuple[Ints, Logits]:
    """Index and value of the largest logit of each row; a row with a NaN has the value NaN."""
    tokens = logits.argmax(axis=1)
    return tokens, logits[np.arange(len(logits)), tokens]


def _adjusted(logits: Logits, plan: _Plan, allowed_mask: npt.NDArray[np.int32] | None) -> Logits:
    """Logits after penalties, minimum length and mask: the same array if nothing changes, else a copy."""
    if allowed_mask is not None:
        bits = np.ascontiguousarray(allowed_mask).view(np.uint8)
        allowed = np.unpackbits(bits, axis=1, count=logits.shape[1], bitorder="little")
        logits = np.where(allowed, logits, np.float32(-np.inf))
    elif plan.adjusting:
        logits = logits.copy()
    for i in plan.adjusting:
        plan.rows[i].adjust(logits[i])
    return logits


def _without(plan: _Plan, failures: Collection[int], vocab_size: int) -> _Draws:
    return _Draws.of(plan.rows, [i for i in plan.draws.index.tolist() if i not in failures], vocab_size)


def _logprobs(logits: Logits, tokens: Ints, wanting: Sequence[int]) -> Logits | None:
    """Log softmax of the raw logits at the chosen tokens, for the rows that want it."""
    if not wanting:
        return None
    result = np.full(len(logits), np.nan, dtype=np.float32)
    for i in wanting:
        if tokens[i] >= 0:
            row = logits[i]
            peak = row.max()
            result[i] = row[tokens[i]] - peak - np.log(np.exp(row - peak).sum(dtype=np.float64))
    return result
