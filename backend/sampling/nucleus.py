"""Exact top-k, top-p, min-p and the draw: for the candidates of many rows at once, or one whole vocabulary.

Weights are exp((logit − largest) / temperature): the heaviest token weighs 1. The filters apply in this
order, the one Hugging Face generation uses: top-k; top-p over what top-k left; min-p. The nucleus is the
shortest run of the heaviest tokens whose mass reaches top_p (Holtzman et al. 2020): a token stays if the
mass of those before it is below top_p. Ties go to the lower id. The draw inverts the cumulated weights of the
kept tokens in order of id.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_DIGIT_BITS: Final = 12
_FEW: Final = 256
_SPAN: Final = 256


@dataclass(frozen=True, slots=True)
class RowFilters:
    """The filters of one row: `top_k` = the vocabulary size, `top_p` = 1, `min_p` = 0 where off."""

    top_k: int
    top_p: float
    min_p: float

    def keep_all(self, vocab_size: int) -> bool:
        """Whether no token is filtered out."""
        return self.top_k >= vocab_size and self.top_p >= 1 and self.min_p <= 0

    def settled_by(self, candidates: Floats, total: float, *, floor: float, vocab_size: int) -> bool:
        """Whether all that stay are among `candidates`: the weights above `floor` of a mass of `total`."""
        if self.top_k <= len(candidates):
            return True
        if self.top_p >= 1:
            return self.min_p > floor
        if self.top_k < vocab_size:  # top-p is over the mass that top-k leaves, which is not known here
            return False
        return self.min_p > floor or float(candidates.sum()) >= self.top_p * total


@dataclass(frozen=True, slots=True)
class Filters:
    """RowFilters of n rows, one array [n] each."""

    top_k: Ints
    top_p: Floats
    min_p: Floats

    def of(self, row: int) -> RowFilters:
        """The filters of one row."""
        return RowFilters(int(self.top_k[row]), float(self.top_p[row]), float(self.min_p[row]))

    def take(self, rows: list[int]) -> "Filters":
        """The filters of some rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw_candidates(weights: Floats, *, filters: Filters, u: Floats, totals: Floats | None = None) -> Ints:
    """Draw one column for each of n rows of candidates, which are in order of id; `u` [n] are uniforms.

    `weights` [n, C] may be padded with zeros on the right. `totals` [n] is the mass of the whole vocabulary
    where tokens were left out; the tokens that stay must all be candidates.
    """
    rows = np.arange(len(weights))
    order = np.argsort(-weights, axis=1, kind="stable")
    heaviest = np.take_along_axis(weights, order, axis=1)
    mass = np.cumsum(heaviest, axis=1)
    last = weights.shape[1]
    by_k = mass[rows, np.minimum(filters.top_k, last) - 1]
    whole = by_k if totals is None else np.where(filters.top_k <= last, by_k, totals)
    goal = np.where(filters.top_p < 1, filters.top_p * whole, np.inf)
    keep = (mass - heaviest < goal[:, None]) & (heaviest > 0) & (heaviest >= filters.min_p[:, None])
    keep &= np.arange(last) < filters.top_k[:, None]
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, heaviest * keep, axis=1)  # never empty: the heaviest passes every filter
    drawn = np.cumsum(kept, axis=1)
    whole_kept = drawn[:, -1:]
    pick = (drawn <= u[:, None] * whole_kept).sum(axis=1)
    columns: Ints = np.minimum(pick, (drawn < whole_kept).sum(axis=1))  # rounding may point past the mass
    return columns


def draw_wide(weights: npt.NDArray[np.float32], filters: RowFilters, *, u: float) -> int:
    """Draw one token from a whole vocabulary [V] without sorting it. Overwrites `weights`."""
    if filters.top_k < len(weights):
        _keep_heaviest(weights, float(filters.top_k), by_mass=False)
    if filters.top_p < 1:
        _keep_heaviest(weights, filters.top_p * float(weights.sum(dtype=np.float64)), by_mass=True)
    if filters.min_p > 0:
        weights[weights < filters.min_p] = 0
    return _draw_by_spans(weights, u)


def _keep_heaviest(weights: npt.NDArray[np.float32], goal: float, *, by_mass: bool) -> None:
    """Zero all but the shortest run of heaviest tokens whose measure (mass, or number) reaches `goal`."""
    edge, kept_at_edge = _edge(weights, goal, by_mass=by_mass)
    np.multiply(weights, weights >= edge, out=weights)
    at_edge = np.flatnonzero(weights == edge)
    weights[at_edge[kept_at_edge:]] = 0


def _edge(weights: npt.NDArray[np.float32], goal: float, *, by_mass: bool) -> tuple[np.float32, int]:
    """The lightest weight that stays, and how many tokens of exactly that weight do.

    Radix selection: a histogram of the bits of the weights (which order as the weights do, being positive),
    the bin where the measure from the top reaches the goal, then that bin alone with finer bits, until few
    weights or equal ones are left.
    """
    inside, above = weights, 0.0
    while True:
        bits = inside.view(np.uint32)
        lowest, highest = int(bits.min()), int(bits.max())
        if lowest == highest or len(inside) <= _FEW:
            break
        shift = max(0, (highest - lowest).bit_length() - _DIGIT_BITS)
        keys = ((bits - np.uint32(lowest)) >> np.uint32(shift)).astype(np.int64)
        bins = np.bincount(keys, weights=inside if by_mass else None)
        from_top = above + np.cumsum(bins[::-1])
        place = int(np.searchsorted(from_top, goal))
        if place == len(bins):  # rounding: the goal is the whole measure
            return inside.min(), len(weights)
        above = float(from_top[place - 1]) if place else above
        inside = inside[keys == len(bins) - 1 - place]
    if lowest == highest:
        each = float(inside[0]) if by_mass else 1.0
        missing = goal - above
        return inside[0], max(1, math.ceil(missing / each)) if each else len(weights)
    ordered = np.sort(inside)[::-1]
    measure = ordered.astype(np.float64) if by_mass else np.ones(len(ordered))
    kept = max(1, int(np.count_nonzero(above + np.cumsum(measure) - measure < goal)))
    edge = ordered[kept - 1]
    return edge, int(np.count_nonzero(ordered[:kept] == edge))


def _draw_by_spans(weights: npt.NDArray[np.float32], u: float) -> int:
    """Inverse of the cumulated weights in order of id: find the span of tokens, then the token in it."""
    spans = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SPAN), dtype=np.float64))
    target = u * spans[-1]
    span = int(np.searchsorted(spans, target, side="right"))
    span = min(span, int(np.searchsorted(spans, spans[-1])))  # rounding may point past the mass
    first = span * _SPAN
    inner = np.cumsum(weights[first : first + _SPAN], dtype=np.float64)
    offset = target - (spans[span - 1] if span else 0.0)
    token = int(np.searchsorted(inner, offset, side="right"))
    return first + min(token, int(np.searchsorted(inner, inner[-1])))
