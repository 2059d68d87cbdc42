"""Emits the linears, the embedding and the head of a decoder for ONNX Runtime, in float32 or block-quantised.

Two forms behind one protocol. Quantised weights are read by MatMulNBits, whose activations are rounded to
int8 in blocks (accuracy_level 4): the fast path on CPUs with int8 dot products. A tied embedding is stored
once: the gather and the head read the same bytes.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from engines.decoder import Decoder, weight_shapes
from engines.onnx_emit import Array, GraphEmitter
from engines.quantise import QuantisedLinear, quantise

CONTRIB = "com.microsoft"
FLOAT = int(TensorProto.FLOAT)
_UINT8 = int(TensorProto.UINT8)
BLOCK = 32  # the least that both quantised kernels are fast at; widths must be multiples of it
WIDE_BLOCK = 64
_INT8_ACTIVATIONS = 4
_HEAD_BITS = 8  # even where the linears have 4: errors of the head go straight to the logits

Floats = npt.NDArray[np.float32]
Weights = Mapping[str, Floats]


class Linears(Protocol):
    """Emits what multiplies by a weight matrix."""

    def embedding(self, tokens: str, out: str) -> str:
        """Rows of the embedding: int64 [B, T] → float32 [B, T, hidden]."""
        ...

    def linear(self, x: str, names: tuple[str, ...], *, bias: bool) -> str:
        """Multiply by one linear, or several stacked along their outputs: x @ Wᵀ (+ bias)."""
        ...

    def logits(self, x: str, out: str) -> str:
        """The head: float32 [B, R, hidden] → [B, R, vocab]."""
        ...


class FloatLinears:
    """Weights in float32, as they are."""

    def __init__(self, decoder: Decoder, emitter: GraphEmitter) -> None:
        self._decoder = decoder
        self._weights = decoder.weights
        self._shapes = weight_shapes(decoder.config)
        self._e = emitter

    def embedding(self, tokens: str, out: str) -> str:
        """See `Linears`."""
        return self._e.node("Gather", [self._table("embed"), tokens], out, axis=0)

    def linear(self, x: str, names: tuple[str, ...], *, bias: bool) -> str:
        """See `Linears`."""
        weights, stacked = self._weights, "+".join(names)

        def make() -> Array:
            return _stack(weights, names).T

        outputs, inputs = _stacked_shape(self._shapes, names)
        weight = self._e.weight(stacked, FLOAT, (inputs, outputs), make)
        product = self._e.node("MatMul", [x, weight], f"{stacked}.product")
        if not bias:
            return product
        return self._e.node("Add", [product, _bias(self._e, weights, names)], f"{stacked}.biased")

    def logits(self, x: str, out: str) -> str:
        """See `Linears`. Gemm multiplies by the table as it is stored: a tied one serves gather and head."""
        e, g = self._e, self._decoder.config.geometry
        table = self._table("embed" if self._decoder.config.tied_embedding else "lm_head")
        by_row = e.constant("head.flat", np.array([-1, g.hidden]))
        flat = e.node("Reshape", [x, by_row], f"{out}.input")
        product = e.node("Gemm", [flat, table], f"{out}.flat", transB=1)
        rows = e.node("Shape", [x], f"{out}.rows", end=2)
        vocab = e.constant("head.vocab", np.array([g.vocab_size]))
        return e.node("Reshape", [product, e.node("Concat", [rows, vocab], f"{out}.shape", axis=0)], out)

    def _table(self, name: str) -> str:
        weights, g = self._weights, self._decoder.config.geometry
        return self._e.weight(name, FLOAT, (g.vocab_size, g.hidden), lambda: weights[name])


class BlockLinears:
    """Weights in 8 or 4 bits with a scale per block; embedding and head always in 8.

    `embed_divisor` [hidden]: what gathered rows are divided by, where the table is stored multiplied by it.
    """

    def __init__(
        self, decoder: Decoder, emitter: GraphEmitter, *, bits: int, embed_divisor: Floats | None = None
    ) -> None:
        self._decoder = decoder
        self._embed_divisor = embed_divisor
        self._weights = decoder.weights
        self._shapes = weight_shapes(decoder.config)
        self._e = emitter
        self._bits = bits

    def embedding(self, tokens: str, out: str) -> str:
        """See `Linears`."""
        g = self._decoder.config.geometry
        codes, scales = self._quantised(("embed",), _HEAD_BITS)
        table = self._e.alias("embed.table", codes, (g.vocab_size, g.hidden))
        divisor = self._embed_divisor
        rows = self._e.node(
            "GatherBlockQuantized", [table, tokens, scales], out if divisor is None else f"{out}.multiplied",
            domain=CONTRIB, bits=_HEAD_BITS, block_size=self._block(_HEAD_BITS), gather_axis=0,
            quantize_axis=1,
        )  # fmt: skip
        if divisor is None:
            return rows
        return self._e.node("Mul", [rows, self._e.constant("embed.factor", 1 / divisor)], out)

    def linear(self, x: str, names: tuple[str, ...], *, bias: bool) -> str:
        """See `Linears`."""
        added = _bias(self._e, self._weights, names) if bias else ""
        return self._product(x, names, f"{'+'.join(names)}.product", bits=self._bits, bias=added)

    def logits(self, x: str, out: str) -> str:
        """See `Linears`."""
        name = "embed" if self._decoder.config.tied_embedding else "lm_head"
        return self._product(x, (name,), out, bits=_HEAD_BITS)

    def _product(self, x: str, names: tuple[str, ...], out: str, *, bits: int, bias: str = "") -> str:
        codes, scales = self._quantised(names, bits)
        outputs, inputs = _stacked_shape(self._shapes, names)
        return self._e.node(
            "MatMulNBits", [x, codes, scales, *(("", "", bias) if bias else ())], out, domain=CONTRIB,
            N=outputs, K=inputs, bits=bits, block_size=self._block(bits), accuracy_level=_INT8_ACTIVATIONS,
        )  # fmt: skip

    def _quantised(self, names: tuple[str, ...], bits: int) -> tuple[str, str]:
        """Codes [out, blocks, bytes of a block] and scales [out, blocks]."""
        weights, stacked = self._weights, "+".join(names)
        rows, inputs = _stacked_shape(self._shapes, names)
        block = self._block(bits)
        blocks = inputs // block
        once = _Once(lambda: quantise(_stack(weights, names), bits, block=block))
        shape = (rows, blocks, block * bits // 8)
        codes = self._e.weight(f"{stacked}.codes", _UINT8, shape, lambda: once.take().codes)
        scales = self._e.weight(f"{stacked}.scales", FLOAT, (rows, blocks), lambda: once.take().scales)
        return codes, scales

    def _block(self, bits: int) -> int:
        """Inputs that share a scale. At 8 bits a wider block is a fifth faster and rounds no worse."""
        widths = (self._shapes["embed"][1], self._shapes["layers.0.o"][1], self._shapes["layers.0.down"][1])
        return WIDE_BLOCK if bits == 8 and all(width % WIDE_BLOCK == 0 for width in widths) else BLOCK


class _Once:
    """Makes a quantised linear once for its codes and its scales, which are written one after the other."""

    def __init__(self, make: Callable[[], QuantisedLinear]) -> None:
        self._make = make
        self._made: QuantisedLinear | None = None

    def take(self) -> QuantisedLinear:
        """The quantised linear; every second take lets go of it."""
        made = self._made if self._made is not None else self._make()
        self._made = made if self._made is None else None
        return made


def _stack(weights: Weights, names: tuple[str, ...]) -> Floats:
    parts = [np.asarray(weights[name], dtype=np.float32) for name in names]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _stacked_shape(shapes: Mapping[str, tuple[int, ...]], names: tuple[str, ...]) -> tuple[int, int]:
    """Outputs of all together, and their common inputs."""
    return sum(shapes[name][0] for name in names), shapes[names[0]][1]


def _bias(e: GraphEmitter, weights: Weights, names: tuple[str, ...]) -> str:
    stacked = np.concatenate([weights[f"{name}.bias"] for name in names])
    return e.constant(f"{'+'.join(names)}.bias", stacked.astype(np.float32))
