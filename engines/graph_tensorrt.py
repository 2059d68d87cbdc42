"""The `tensorrt` target: a decoder as an ONNX graph of standard opset-24 operators TensorRT reads rightly.

    input_ids → embedding → layers × (norm → q, k, v → rope → TensorScatter into the lane caches
              → slice to the window W → Attention with an explicit mask → norm → gated MLP) → norm → logits

The caches are graph inputs of static length S that TensorScatter writes in place (TensorRT: KVCacheUpdate);
attention reads only their first W = len(kv_positions) positions: its cost follows the sequence, not the room.

Invariants
- The mask is explicit, `kv_positions <= position_ids`. Never `is_causal`, never `nonpad_kv_seqlen`: the
  parser of TensorRT takes the former as an upper-left triangle, wrong for one query over a longer cache, and
  leaves the latter unread.
- The softmax scale is folded into the query weights in float32: the parser would multiply queries and keys by
  its square root in the graph's precision, which in bfloat16 is off by up to 0.4 % each.
- The caller keeps caches finite everywhere: a masked position has weight 0, and 0 · NaN is NaN. In float16 it
  must also be no larger than KV is, or its score overflows before the mask is added.
- Every declared input is read, and present_* differ from past_* only at written positions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from onnx import TensorProto

from engines.decoder import Decoder
from engines.errors import BuildError
from engines.int4 import INT4_BLOCK, Int4Weights
from engines.onnx_emit import Array, EmittedGraph, GraphEmitter, as_bfloat16
from engines.rope import rotary_tables

Precision: TypeAlias = Literal["float32", "float16", "bfloat16", "int4"]

OPSET = 24
IR_VERSION = 11  # the IR of ONNX 1.19/1.20, the first releases with opset 24
_CACHE_ALIGNMENT = 256  # bytes; a lane's slice of a cache tensor must start at a multiple of it

_ELEMENTS: dict[str, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int4": TensorProto.FLOAT16,
}


def build_graph(
    decoder: Decoder, *, positions: int, precision: Precision, weight_errors: dict[str, float] | None = None
) -> EmittedGraph:
    """The graph of `decoder` with S = `positions`; activations, KV and norms in `precision` (int4: float16).

    The number of lanes is no property of the graph: batch, tokens and window are symbolic. `weight_errors` is
    filled while the weights are written, with the relative error of each that is rounded to 4 bits. Raises
    BuildError where TensorRT could not run the result.
    """
    if precision not in get_args(Precision):
        raise BuildError(f"precision: {precision}, supported: {', '.join(get_args(Precision))}")
    _check_sizes(decoder, positions, precision)
    builder = _Builder(decoder, positions, precision)
    if weight_errors is not None:
        builder.int4.errors = weight_errors
    return builder.build()


def _check_sizes(decoder: Decoder, positions: int, precision: Precision) -> None:
    g, config = decoder.config.geometry, decoder.config
    lane_bytes = g.kv_heads * positions * g.head_dim * (4 if precision == "float32" else 2)
    if lane_bytes % _CACHE_ALIGNMENT:
        raise BuildError(
            f"positions: {positions} makes a lane of {lane_bytes} bytes in one cache tensor, "
            f"supported: multiples of {_CACHE_ALIGNMENT} bytes"
        )
    if precision == "int4":
        widths = {"hidden": g.hidden, "ffn": config.ffn, "query_heads·head_dim": g.query_heads * g.head_dim}
        for field, width in widths.items():
            if width % INT4_BLOCK:
                raise BuildError(f"{field}: {width}, supported for int4: multiples of {INT4_BLOCK}")


@dataclass(frozen=True, slots=True)
class _Step:
    """Tensors that every layer reads."""

    position_ids: str
    write_indices: str
    mask: str
    window: str
    cos: str
    sin: str


class _ScaledQueries(Mapping[str, Array]):
    """The weights of a decoder, 1/√D folded in where queries take their final size: norm, else projection."""

    def __init__(self, decoder: Decoder) -> None:
        self._weights = decoder.weights
        self._suffixes = (".q_norm",) if decoder.config.qk_norm else (".q", ".q.bias")
        self._factor = np.float32(decoder.config.geometry.head_dim**-0.5)

    def __getitem__(self, name: str) -> Array:
        weight = self._weights[name]
        return weight * self._factor if name.endswith(self._suffixes) else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _Builder:
    def __init__(self, decoder: Decoder, positions: int, precision: Precision) -> None:
        self._weights = _ScaledQueries(decoder)
        self._config = decoder.config
        self._geometry = decoder.config.geometry
        self._positions = positions
        self._is_int4 = precision == "int4"
        self.int4 = Int4Weights(self._weights)
        self._element = _ELEMENTS[precision]
        self._emit = GraphEmitter("decoder")

    def build(self) -> EmittedGraph:
        emit, g = self._emit, self._geometry
        ids = emit.input("input_ids", TensorProto.INT64, ["batch", "tokens"])
        step = self._step()
        emit.output("logits", TensorProto.FLOAT, ["batch", "logit_rows", g.vocab_size])
        logit_indices = emit.input("logit_indices", TensorProto.INT64, ["batch", "logit_rows"])
        x = emit.node("Gather", [self._table("embed", (g.vocab_size, g.hidden)), ids], "embedded")
        for layer in range(g.layers):
            x = self._layer(f"layers.{layer}", layer, x, step)
        wanted = emit.node("Unsqueeze", [logit_indices, self._ints(-1)], "logit_indices.3d")
        rows = emit.node("GatherND", [x, wanted], "rows", batch_dims=1)
        logits = self._head(self._norm("norm", rows, g.hidden))
        emit.node("Cast", [logits], "logits", to=TensorProto.FLOAT)
        return emit.finish(opsets={"": OPSET}, ir_version=IR_VERSION)

    def _step(self) -> _Step:
        emit, config = self._emit, self._config
        position_ids = emit.input("position_ids", TensorProto.INT64, ["batch", "tokens"])
        write_indices = emit.input("write_indices", TensorProto.INT64, ["batch"])
        kv_positions = emit.input("kv_positions", TensorProto.INT64, ["window"])
        queries = emit.node("Unsqueeze", [position_ids, self._ints(1, 3)], "queries.4d")
        mask = emit.node("LessOrEqual", [kv_positions, queries], "mask")  # [B, 1, T, W]
        cos, sin = rotary_tables(config.rope_inv_freq, self._positions, config.rope_attention_factor)
        return _Step(
            position_ids=position_ids,
            write_indices=write_indices,
            mask=mask,
            window=emit.node("Shape", [kv_positions], "window.length"),
            cos=self._weight("rope.cos", cos.shape, lambda: cos),
            sin=self._weight("rope.sin", sin.shape, lambda: sin),
        )

    def _layer(self, name: str, layer: int, x: str, step: _Step) -> str:
        emit, hidden = self._emit, self._geometry.hidden
        attended = self._attention(name, layer, self._norm(f"{name}.attn_norm", x, hidden), step)
        x = emit.node("Add", [x, attended], f"{name}.attended")
        expanded = self._mlp(name, self._norm(f"{name}.mlp_norm", x, hidden))
        return emit.node("Add", [x, expanded], f"{name}.expanded")

    def _attention(self, name: str, layer: int, x: str, step: _Step) -> str:
        emit, g = self._emit, self._geometry
        q = self._heads(f"{name}.q", x, g.query_heads)
        k = self._heads(f"{name}.k", x, g.kv_heads)
        v = self._heads(f"{name}.v", x, g.kv_heads)
        if self._config.qk_norm:
            q = self._norm(f"{name}.q_norm", q, g.head_dim)
            k = self._norm(f"{name}.k_norm", k, g.head_dim)
        rope = [step.cos, step.sin, step.position_ids]
        q = emit.node("RotaryEmbedding", [q, *rope], f"{name}.q.rope")
        k = emit.node("RotaryEmbedding", [k, *rope], f"{name}.k.rope")
        keys = self._cached(f"key_{layer}", k, step)
        values = self._cached(f"value_{layer}", v, step)
        y = emit.node("Attention", [q, keys, values, step.mask], f"{name}.attention", is_causal=0, scale=1.0)
        y = emit.node("Transpose", [y], f"{name}.attention.bthd", perm=[0, 2, 1, 3])
        width = g.query_heads * g.head_dim
        y = emit.node("Reshape", [y, self._ints(0, 0, width)], f"{name}.attention.flat")
        return self._linear(f"{name}.o", y, (g.hidden, width), bias=self._config.o_bias)

    def _heads(self, name: str, x: str, heads: int) -> str:
        """Project to [B, heads, T, D]."""
        emit, g = self._emit, self._geometry
        y = self._linear(name, x, (heads * g.head_dim, g.hidden), bias=self._config.qkv_bias)
        y = emit.node("Reshape", [y, self._ints(0, 0, heads, g.head_dim)], f"{name}.bthd")
        return emit.node("Transpose", [y], f"{name}.bhtd", perm=[0, 2, 1, 3])

    def _cached(self, name: str, update: str, step: _Step) -> str:
        """Write `update` into the cache, which must be the graph input itself; its first W positions."""
        emit, g = self._emit, self._geometry
        shape: list[int | str] = ["batch", g.kv_heads, self._positions, g.head_dim]
        past = emit.input(f"past_{name}", self._element, shape)
        present = emit.node("TensorScatter", [past, update, step.write_indices], f"present_{name}", axis=2)
        emit.output(present, self._element, shape)
        return emit.node("Slice", [present, self._ints(0), step.window, self._ints(2)], f"{name}.window")

    def _mlp(self, name: str, x: str) -> str:
        """down(silu(gate(x)) · up(x))."""
        emit, hidden, ffn = self._emit, self._geometry.hidden, self._config.ffn
        gate = self._linear(f"{name}.gate", x, (ffn, hidden))
        up = self._linear(f"{name}.up", x, (ffn, hidden))
        sigmoid = emit.node("Sigmoid", [gate], f"{name}.sigmoid")
        silu = emit.node("Mul", [gate, sigmoid], f"{name}.silu")
        product = emit.node("Mul", [silu, up], f"{name}.product")
        return self._linear(f"{name}.down", product, (hidden, ffn))

    def _head(self, x: str) -> str:
        g, weights = self._geometry, self._weights
        source = "embed" if self._config.tied_embedding else "lm_head"
        weight = self._weight("lm_head.t", (g.hidden, g.vocab_size), lambda: weights[source].T)
        return self._emit.node("MatMul", [x, weight], "head")

    def _norm(self, name: str, x: str, width: int) -> str:
        """RMS norm over the last axis, its sums in float32 whatever the precision."""
        eps = self._config.norm_eps
        scale = self._table(name, (width,))
        return self._emit.node(
            "RMSNormalization", [x, scale], f"{name}.normed", axis=-1, epsilon=eps, stash_type=1
        )

    def _linear(self, name: str, x: str, shape: tuple[int, int], *, bias: bool = False) -> str:
        """Multiply by the weight of canonical `shape` [out, in] (held as [in, out]) and add the bias."""
        weight = self._int4_weight(name, shape) if self._is_int4 else self._transposed(name, shape)
        y = self._emit.node("MatMul", [x, weight], f"{name}.matmul")
        if not bias:
            return y
        return self._emit.node("Add", [y, self._table(f"{name}.bias", shape[:1])], f"{name}.biased")

    def _transposed(self, name: str, shape: tuple[int, int]) -> str:
        weights = self._weights
        return self._weight(f"{name}.t", shape[::-1], lambda: weights[name].T)

    def _int4_weight(self, name: str, shape: tuple[int, int]) -> str:
        emit, int4 = self._emit, self.int4
        columns, rows = shape
        scales = (rows // INT4_BLOCK, columns)
        parts = [
            emit.weight(f"{name}.codes", TensorProto.INT4, (rows, columns), lambda: int4.codes(name)),
            emit.weight(f"{name}.scales", self._element, scales, lambda: int4.scales(name)),
        ]
        return emit.node("DequantizeLinear", parts, f"{name}.t", axis=0, block_size=INT4_BLOCK)

    def _table(self, name: str, shape: tuple[int, ...]) -> str:
        """A canonical weight in its own layout."""
        weights = self._weights
        return self._weight(name, shape, lambda: weights[name])

    def _weight(self, name: str, shape: tuple[int, ...], make: Callable[[], Array]) -> str:
        convert = _CONVERSIONS[self._element]
        return self._emit.weight(name, self._element, shape, lambda: convert(make()))

    def _ints(self, *values: int) -> str:
        return self._emit.constant("ints." + ".".join(map(str, values)), np.asarray(values, dtype=np.int64))


def _as_float16(values: Array) -> Array:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    if not np.isfinite(narrow).all():
        largest = float(np.abs(values).max())
        raise BuildError(f"precision: float16 cannot hold a weight of {largest}, supported: bfloat16")
    return narrow


_CONVERSIONS: dict[int, Callable[[Array], Array]] = {
    TensorProto.FLOAT: lambda values: values.astype(np.float32, copy=False),
    TensorProto.FLOAT16: _as_float16,
    TensorProto.BFLOAT16: as_bfloat16,
}
