"""What a step asks of the device: the part that stays while the same rows come again, and what is shipped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backend.sampling.rows import SequenceRow

Tensor = Any
Doubles = npt.NDArray[np.float64]

_OFF: Final = 2.0  # a top_p that no rounding can bring below the whole mass


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Parameters of n rows. `parameters` are scale, top_k, top_p, min_p [n]; `filters` whether top_k, top_p,
    min_p filter anything; `rates` [3, m] repetition, frequency and presence of the m penalised rows.
    """

    rows: list[SequenceRow]
    drawing: list[int]
    seeds: npt.NDArray[np.uint64]
    parameters: list[Doubles]
    filters: tuple[bool, bool, bool]
    penalised: list[int]
    rates: Doubles
    wanting_logprobs: list[int]

    @classmethod
    def of(cls, rows: Sequence[SequenceRow], vocab_size: int) -> "DevicePlan":
        """Collect the parameters of `rows`; those of greedy rows filter nothing."""
        drawing = [i for i, row in enumerate(rows) if not row.greedy]
        penalised = [i for i, row in enumerate(rows) if row.history is not None]
        params = [rows[i].params for i in drawing]
        scale, top_p = np.ones(len(rows)), np.full(len(rows), _OFF)
        top_k, min_p = np.full(len(rows), float(vocab_size)), np.zeros(len(rows))
        scale[drawing] = [np.float32(1 / p.temperature) for p in params]
        top_k[drawing] = [min(p.top_k or vocab_size, vocab_size) for p in params]
        top_p[drawing] = [p.top_p if p.top_p < 1 else _OFF for p in params]
        min_p[drawing] = [_least_float32(p.min_p) for p in params]
        rates = np.array(
            [
                [np.float32(getattr(rows[i].params, f"{name}_penalty")) for i in penalised]
                for name in ("repetition", "frequency", "presence")
            ]
        )
        return cls(
            rows=list(rows),
            drawing=drawing,
            seeds=np.array([p.seed for p in params], dtype=np.uint64),
            parameters=[scale, top_k, top_p, min_p],
            filters=(bool((top_k < vocab_size).any()), bool((top_p < 1).any()), bool((min_p > 0).any())),
            penalised=penalised,
            rates=rates,
            wanting_logprobs=[i for i, row in enumerate(rows) if row.logprobs],
        )


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What one step ships, on the device; cells are counted from the beginning of the row's slab."""

    u: Tensor
    scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalised_cells: Tensor
    slots: Tensor
    rates: Tensor
    width: int
    banned_rows: list[int]
    banned_cells: Tensor
    mask: Tensor | None

    @property
    def adjusts(self) -> bool:
        """Whether logits change before the choice."""
        return self.mask is not None or self.width > 0 or bool(self.banned_rows)


def _least_float32(value: float) -> float:
    """The least float32 that is not below `value`: comparing with it is comparing with `value`."""
    near = np.float32(value)
    return float(near if near >= value else np.nextafter(near, np.float32(np.inf)))
