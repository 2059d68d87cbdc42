"""Moves range from activations to weights before quantisation, so that rounding both to few bits costs less.

The input of a linear is divided by a factor per channel and its weight multiplied by it: the same function,
but channels that are large everywhere no longer set the step of their whole block. The factor is the square
root of the channel's size, so half of the range moves (cf. SmoothQuant, Xiao et al. 2022, and AWQ, Lin et
al. 2023). Divisions cost nothing at run time: they go into what makes the input, a norm's weight or the rows
of the linear before it.

Invariants
- Factors are powers of two, so that without quantisation a smoothed decoder computes the very same function;
  and a small difference in how a machine measures rarely picks another factor.
- A tied embedding serves the head too: it is stored multiplied, and rows gathered from it are to be divided.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engines.calibration import Floats, LinearInputs, measure_inputs
from engines.decoder import Decoder, DecoderConfig

_SHARE = 0.5  # of a channel's range that moves to the weights
_MOST = 6  # factors stay within 2^±6


@dataclass(frozen=True, slots=True)
class SmoothedDecoder:
    """`embed_divisor` [hidden]: what rows of a tied embedding are divided by; None where it is not tied."""

    decoder: Decoder
    embed_divisor: Floats | None


def smooth(decoder: Decoder) -> SmoothedDecoder:
    """Measure the inputs of the decoder's linears and spread their range."""
    weights = _SmoothedWeights(decoder, measure_inputs(decoder))
    divisor = weights.head if decoder.config.tied_embedding else None
    return SmoothedDecoder(replace(decoder, weights=weights), divisor)


class _SmoothedWeights(Mapping[str, Floats]):
    """The weights of a decoder with every factor folded in, each made when it is asked for."""

    def __init__(self, decoder: Decoder, inputs: LinearInputs) -> None:
        self._weights = decoder.weights
        config = decoder.config
        self.head = _factors(inputs.head)
        self._columns: dict[str, Floats] = {"embed" if config.tied_embedding else "lm_head": self.head}
        self._rows: dict[str, Floats] = {"norm": self.head}
        for layer, seen in enumerate(inputs.layers):
            self._add_layer(f"layers.{layer}", config, [seen.attention, seen.output, seen.mlp, seen.down])

    def __getitem__(self, name: str) -> Floats:
        weight = self._weights[name]
        rows, columns = self._rows.get(name.removesuffix(".bias")), self._columns.get(name)
        if rows is not None:
            weight = weight / (rows if weight.ndim == 1 else rows[:, None])
        return np.asarray(weight if columns is None else weight * columns, dtype=np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def _add_layer(self, p: str, config: DecoderConfig, inputs: list[Floats]) -> None:
        g = config.geometry
        attention, output, mlp, down = inputs
        # Query heads of a group read the same values, so they share factors.
        groups = output.reshape(g.kv_heads, -1, g.head_dim)
        values = _factors(np.sqrt(np.mean(groups * groups, axis=1)).reshape(-1))
        by_query_head = np.repeat(values.reshape(g.kv_heads, 1, g.head_dim), groups.shape[1], axis=1)
        before_attention, before_mlp, gated = _factors(attention), _factors(mlp), _factors(down)
        self._rows |= {f"{p}.attn_norm": before_attention, f"{p}.mlp_norm": before_mlp}
        self._rows |= {f"{p}.v": values, f"{p}.up": gated}
        self._columns |= dict.fromkeys((f"{p}.q", f"{p}.k", f"{p}.v"), before_attention)
        self._columns |= dict.fromkeys((f"{p}.gate", f"{p}.up"), before_mlp)
        self._columns |= {f"{p}.o": by_query_head.reshape(-1), f"{p}.down": gated}


def _factors(size: npt.NDArray[np.float32]) -> Floats:
    """The power of two nearest to (size / geometric mean)^share, per channel; 1 where a size is no number."""
    logs = np.log2(np.maximum(size, np.float32(1e-12)))
    moved = np.clip(np.rint(_SHARE * (logs - logs.mean())), -_MOST, _MOST)
    return np.asarray(np.exp2(np.nan_to_num(moved, nan=0.0)), dtype=np.float32)
