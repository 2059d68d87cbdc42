"""Exact top-k, top-p, min-p and the draw on a device: no sort, no branch on data, the same for any batch.

Weights are exp((logit − largest) / temperature) in float32, as in `nucleus`. Masses are the same in fixed
point: int64, in units of 2^−K of the heaviest token, K as large as a whole vocabulary of them allows (45 for
128 k). Sums of integers do not depend on their order, so neither the number of rows nor how a GPU splits a
sum can change a token. Fixed point loses at most V · 2^−K of a mass (2e-9 of the heaviest token), far less
than the rounding of float32 weights.

The shortest run of the heaviest tokens that reaches a goal is found by radix selection over the bits of the
weights (which order as the weights do, being positive): two histograms per row, of the upper and the lower
15 bits. In other words: the lightest tokens are dropped, higher ids first among equals, as long as what is
dropped stays within what the goal leaves over.

Everything is enqueued: no operation here waits for the device. torch is handed in. Threads: one owner.
"""

from typing import Any, Final

Torch = Any
Tensor = Any

SPAN: Final = 256
_DIGIT_BITS: Final = 15
_BINS: Final = 1 << _DIGIT_BITS


def padded(vocab_size: int) -> int:
    """Columns of the work space: whole spans, and at least one column beyond the vocabulary."""
    return (vocab_size // SPAN + 1) * SPAN


class Slab:
    """Room for the weights of up to `rows` rows [rows, padded V], and what is done with them.

    The columns beyond the vocabulary hold −inf as logits, and no weight and no mass.
    """

    def __init__(self, torch: Torch, rows: int, vocab_size: int, *, device: str) -> None:
        self._torch = torch
        self._vocab_size = vocab_size
        self.rows = rows
        self.columns = padded(vocab_size)
        self._unit = 2.0 ** (62 - (self.columns - 1).bit_length())
        size, spans = (rows, self.columns), self.columns // SPAN

        def room(shape: tuple[int, ...], dtype: Any) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._weights, self._scaled = room(size, torch.float32), room(size, torch.float32)
        self._masses, self._index, self._part = (room(size, torch.int64) for _ in range(3))
        self._flags, self._more_flags = room(size, torch.bool), room(size, torch.bool)
        self._ranks = room((rows, spans, SPAN), torch.int32)
        self._bins, self._below = (room((rows, _BINS), torch.int64) for _ in range(2))
        self._one = torch.ones((1, 1), dtype=torch.int64, device=device)
        self._first_span = torch.arange(rows, device=device) * spans
        self.first_cell = torch.arange(rows, device=device) * self.columns

    @staticmethod
    def bytes_per_row(vocab_size: int) -> int:
        """Device memory for each row."""
        return padded(vocab_size) * (2 * 4 + 3 * 8 + 2 + 4) + 2 * 8 * _BINS

    def take(self, logits: Tensor) -> Tensor:
        """A copy of `logits` [n, V] that may be changed: [n, padded V]."""
        copy = self._weights[: len(logits)]
        copy[:, : self._vocab_size].copy_(logits)
        copy[:, self._vocab_size :].fill_(float("-inf"))
        return copy

    def log_mass(self, logits: Tensor, peaks: Tensor) -> Tensor:
        """Log of the sum of exp(logit − peak) of each row, float64 [n]."""
        scaled = self._scaled[: len(logits)]
        within = scaled[:, : self._vocab_size]
        self._torch.sub(logits, peaks[:, None], out=within)
        within.exp_().nan_to_num_(nan=0.0, posinf=0.0).mul_(self._unit)
        masses = self._masses[: len(logits)].copy_(scaled)
        return masses.sum(1).double().mul_(1 / self._unit).log_()

    def weigh(self, logits: Tensor, peaks: Tensor, scale: Tensor) -> None:
        """Make weights and masses of `logits` [n, V], or of what `take` gave; `peaks` and `scale` [n].

        A row whose peak is no number gets no mass at all: it fails without an index out of bounds.
        """
        rows = len(logits)
        weights = self._weights[:rows]
        within = weights[:, : logits.shape[1]]
        self._torch.sub(logits, peaks[:, None], out=within)
        within.mul_(scale[:, None]).exp_().nan_to_num_(nan=0.0, posinf=0.0)
        weights[:, self._vocab_size :].zero_()
        self._measure(rows)

    def _measure(self, rows: int) -> None:
        scaled = self._torch.mul(self._weights[:rows], self._unit, out=self._scaled[:rows])
        self._masses[:rows].copy_(scaled)

    def keep_top_k(self, top_k: Tensor) -> None:
        """Keep the `top_k` [n] heaviest tokens of each row; int64, any number from 1 to V."""
        rows = len(top_k)
        counts = self._one.expand(rows, self.columns)
        self._drop_lightest(counts, self.columns - top_k, weighed=False)

    def keep_top_p(self, top_p: Tensor) -> None:
        """Keep the shortest run of heaviest tokens that reaches `top_p` [n] (float64) of what is left."""
        masses = self._masses[: len(top_p)]
        whole = masses.sum(1)
        goal = (whole.double() * top_p).ceil_().long().clamp_(min=1)
        self._drop_lightest(masses, (whole - goal).clamp_(min=0), weighed=True)

    def keep_min_p(self, min_p: Tensor) -> None:
        """Keep tokens of at least the weight `min_p` [n], float32."""
        rows = len(min_p)
        heavy = self._torch.ge(self._weights[:rows], min_p[:, None], out=self._flags[:rows])
        self._masses[:rows].mul_(heavy)

    def draw(self, u: Tensor) -> Tensor:
        """The lowest id at which the cumulated mass exceeds u of the whole: float64 [n] → int64 [n]."""
        rows = len(u)
        by_span = self._masses[:rows].view(rows, -1, SPAN)
        spans = by_span.sum(2)
        reached = spans.cumsum(1)
        whole = reached[:, -1]
        target = (whole.double() * u).long().minimum(whole - 1)[:, None]
        span = (reached <= target).sum(1, keepdim=True).clamp_(max=spans.shape[1] - 1)
        missing = target - (reached.gather(1, span) - spans.gather(1, span))
        span = span[:, 0]
        inner = self._masses.view(-1, SPAN).index_select(0, self._first_span[:rows] + span).cumsum(1)
        return (span * SPAN + (inner <= missing).sum(1)).clamp_(max=self._vocab_size - 1)

    def _drop_lightest(self, measure: Tensor, slack: Tensor, *, weighed: bool) -> None:
        """Take the mass from as many of the lightest tokens as `slack` covers.

        `slack` [n] is in terms of `measure` [n, padded V], and less than a row's whole: something stays.
        """
        rows = len(slack)
        bits = self._weights[:rows].view(self._torch.int32)
        index = self._index[:rows]
        upper, slack, _ = self._bin(
            index.copy_(bits).bitwise_right_shift_(_DIGIT_BITS), measure, slack[:, None]
        )
        inside = self._torch.eq(index, upper, out=self._flags[:rows])
        part = self._torch.mul(measure, inside, out=self._part[:rows])
        lower, slack, at_edge = self._bin(index.copy_(bits).bitwise_and_(_BINS - 1), part, slack)
        edge = upper.bitwise_left_shift(_DIGIT_BITS).bitwise_or_(lower).int()
        each = self._mass_of(edge) if weighed else self._one
        kept_at_edge = (at_edge - slack).add_(each - 1).div_(each, rounding_mode="floor")
        self._masses[:rows].mul_(self._stay(bits, edge, kept_at_edge))

    def _bin(self, index: Tensor, measure: Tensor, slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The bin [n, 1] in which `slack` is used up, what is left of it there, and what the bin measures."""
        bins = self._bins[: len(index)].zero_().scatter_add_(1, index, measure)
        below = self._torch.cumsum(bins, 1, out=self._below[: len(index)]).sub_(bins)
        chosen = (below <= slack).sum(1, keepdim=True).sub_(1).clamp_(min=0)
        return chosen, slack - below.gather(1, chosen), bins.gather(1, chosen)

    def _mass_of(self, edge: Tensor) -> Tensor:
        """Mass of one token whose weight has the bits `edge`; never 0: a row without mass divides too."""
        return edge.view(self._torch.float32).mul(self._unit).long().clamp_(min=1)

    def _stay(self, bits: Tensor, edge: Tensor, kept_at_edge: Tensor) -> Tensor:
        """Which stay: tokens heavier than the edge, and by id the first `kept_at_edge` of those on it."""
        rows = len(bits)
        stay, few = self._flags[:rows], self._more_flags[:rows]
        self._torch.eq(bits, edge, out=stay)
        by_span = few.view(rows, -1, SPAN)
        ranks = self._torch.cumsum(
            stay.view(rows, -1, SPAN), 2, dtype=self._torch.int32, out=self._ranks[:rows]
        )
        in_span = ranks[:, :, -1]
        before = in_span.cumsum(1).sub_(in_span)
        self._torch.le(ranks, (kept_at_edge - before)[:, :, None], out=by_span)
        stay.logical_and_(few)
        return stay.logical_or_(self._torch.gt(bits, edge, out=few))
