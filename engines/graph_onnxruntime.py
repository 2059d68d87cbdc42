"""Builds the contract graph for ONNX Runtime on CPU: grouped-query attention over in-place lanes, 4- and
8-bit linears.

    input_ids      int64 [B, T]    tokens; rows may be padded on the right write_indices  int64 [B]
    first cache position written; at least 1 for an idle row query_lens     int32 [B]       tokens of the row
    that count, 0 = idle: its lane is left untouched logit_indices  int64 [B, R]    which tokens of the row
    want logits past_key_i, past_value_i       float32 [B, Hkv, S, D], bound at the same address as
    present_key_i, present_value_i logits         float32 [B, R, V]

Positions follow from write_indices, the attended range from the valid length, so the contract's
position_ids and kv_positions are absent.

Same bits whatever the split and the batch: the attention kernel works on blocks of an even number of
queries, and takes another path, which rounds differently, where one query is left over. So attention always
sees an even number: where a row has an odd one, its last query is doubled. The second lands one position
beyond the valid end (hence a scratch position after max_seq_len), where the next step overwrites it, and its
output is dropped. All other kernels used here compute rows independently.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from onnx import TensorProto

from engines.contract import Geometry
from engines.decoder import Decoder
from engines.errors import BuildError
from engines.onnx_emit import Array, EmittedGraph, GraphEmitter
from engines.quantise import BLOCK, QuantisedLinear, quantise
from engines.rope import rotary_tables

Precision = Literal["int8", "int4", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("int8", "int4", "fp32")

_OPSETS = {"": 23, "com.microsoft": 1}
_IR_VERSION = 10
_CONTRIB = "com.microsoft"
_INT8_ACTIVATIONS = 4  # MatMulNBits accuracy_level: activations are rounded to int8 per block
_FLOAT = int(TensorProto.FLOAT)
_UINT8 = int(TensorProto.UINT8)


def build_onnxruntime_graph(decoder: Decoder, *, precision: Precision, positions: int) -> EmittedGraph:
    """The graph of `decoder` for lanes of up to `positions` cache positions; BuildError names what is
    unsupported.
    """
    _check(decoder, precision)
    return _DecoderGraph(decoder, precision, positions).build()


def _check(decoder: Decoder, precision: Precision) -> None:
    config = decoder.config
    g = config.geometry
    if precision not in PRECISIONS:
        raise BuildError(f"precision: must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if g.query_heads % g.kv_heads:
        raise BuildError(f"query_heads: must be a multiple of kv_heads {g.kv_heads}, got {g.query_heads}")
    if g.head_dim % 16:
        raise BuildError(f"head_dim: must be a multiple of 16, got {g.head_dim}")
    widths = {"hidden": g.hidden, "ffn": config.ffn, "query_heads × head_dim": g.query_heads * g.head_dim}
    for name, width in widths.items():
        if precision != "fp32" and width % BLOCK:
            raise BuildError(f"{name}: must be a multiple of {BLOCK} for precision {precision}, got {width}")


@dataclass(slots=True)
class _Rows:
    """Tensors that every layer shares: how queries are doubled, and how far each row's cache reaches."""

    doubled: str
    tokens: str
    valid_minus_one: str
    query_lens: str
    longest: str
    cos: str
    sin: str


class _DecoderGraph:
    def __init__(self, decoder: Decoder, precision: Precision, positions: int) -> None:
        self._decoder = decoder
        self._config = decoder.config
        self._precision: Precision = precision
        self._positions = positions
        self._e = GraphEmitter("tensorcache_onnxruntime")

    def build(self) -> EmittedGraph:
        e, layers = self._e, self._config.geometry.layers
        e.input("input_ids", int(TensorProto.INT64), ["B", "T"])
        e.input("write_indices", int(TensorProto.INT64), ["B"])
        e.input("query_lens", int(TensorProto.INT32), ["B"])
        e.input("logit_indices", int(TensorProto.INT64), ["B", "R"])
        last_axis = e.constant("last_axis", np.array([-1], dtype=np.int64))
        self._wanted_index = e.node("Unsqueeze", ["logit_indices", last_axis], "wanted.index")
        rows = self._rows()
        stream, branch = self._embedding(), ""
        for layer in range(layers):
            last = layer == layers - 1
            normed, stream = self._add_norm(stream, branch, f"layers.{layer}.attn_norm")
            attended = self._attention(normed, layer, rows)
            if last:  # only rows whose logits are wanted go on: the cache is complete by now
                attended, stream = self._wanted(attended, "attended"), self._wanted(stream, "stream")
            branch = self._linear(attended, f"layers.{layer}.o", bias=self._config.o_bias)
            normed, stream = self._add_norm(stream, branch, f"layers.{layer}.mlp_norm")
            branch = self._mlp(normed, layer)
        normed, _ = self._add_norm(stream, branch, "norm")
        self._logits(normed)
        e.output("logits", _FLOAT, ["B", "R", self._config.geometry.vocab_size])
        for layer in range(layers):
            for kind in ("key", "value"):
                e.output(f"present_{kind}_{layer}", _FLOAT, self._cache_shape(self._config.geometry))
        return e.finish(opsets=_OPSETS, ir_version=_IR_VERSION)

    @staticmethod
    def _cache_shape(g: Geometry) -> list[int | str]:
        return ["B", g.kv_heads, "S", g.head_dim]

    def _scalar(self, name: str, value: int, dtype: type[np.int64] | type[np.int32]) -> str:
        return self._e.constant(name, np.array(value, dtype=dtype))

    def _rows(self) -> _Rows:
        e = self._e
        zero = self._scalar("zero", 0, np.int64)
        one = self._scalar("one", 1, np.int64)
        two = self._scalar("two", 2, np.int64)
        one32 = self._scalar("one.int32", 1, np.int32)
        shape = e.node("Shape", ["input_ids"], "ids.shape")
        tokens = e.node("Gather", [shape, one], "tokens", axis=0)
        queries = e.node("Add", [tokens, e.node("Mod", [tokens, two], "tokens.odd")], "queries")
        ramp = e.node("Range", [zero, queries, one], "ramp")
        doubled = e.node("Min", [ramp, e.node("Sub", [tokens, one], "last_token")], "doubled")
        odd = e.node("Mod", ["query_lens", self._scalar("two.int32", 2, np.int32)], "odd")
        queries_of = e.node("Add", ["query_lens", odd], "queries_of_row")
        written = e.node("Cast", ["write_indices"], "written", to=int(TensorProto.INT32))
        valid = e.node("Add", [written, queries_of], "valid")
        valid_minus_one = e.node("Sub", [valid, one32], "valid_minus_one")
        queries32 = e.node("Cast", [queries], "queries.int32", to=int(TensorProto.INT32))
        farthest = e.node("ReduceMax", [valid], "farthest", keepdims=0)
        longest = e.node("Max", [farthest, queries32], "longest")
        vector = e.constant("vector", np.array([1], dtype=np.int64))
        return _Rows(
            doubled=doubled,
            tokens=e.node("Reshape", [tokens, vector], "tokens.vector"),
            valid_minus_one=valid_minus_one,
            query_lens=queries_of,
            longest=longest,
            cos=self._rope("cos"),
            sin=self._rope("sin"),
        )

    def _rope(self, kind: Literal["cos", "sin"]) -> str:
        config = self._config
        shape = (self._positions, config.geometry.head_dim // 2)

        def make() -> Array:
            tables = rotary_tables(config.rope_inv_freq, self._positions, config.rope_attention_factor)
            return tables[0 if kind == "cos" else 1]

        return self._e.weight(f"rope.{kind}", _FLOAT, shape, make)

    def _vector(self, name: str) -> str:
        return self._e.constant(name, np.asarray(self._decoder.weights[name], dtype=np.float32))

    def _add_norm(self, stream: str, branch: str, name: str) -> tuple[str, str]:
        """RMS norm of stream + branch, and that sum."""
        e, gamma = self._e, self._vector(name)
        epsilon = self._config.norm_eps
        if not branch:
            out = e.node(
                "SimplifiedLayerNormalization", [stream, gamma], f"{name}.out", epsilon=epsilon, axis=-1
            )
            return out, stream
        out, _, _, total = e.nodes(
            "SkipSimplifiedLayerNormalization", [stream, branch, gamma], [f"{name}.out", "", "", f"{name}.sum"],
            domain=_CONTRIB, epsilon=epsilon,
        )  # fmt: skip
        return out, total

    def _attention(self, normed: str, layer: int, rows: _Rows) -> str:
        e, g, p = self._e, self._config.geometry, f"layers.{layer}"
        packed = self._linear(normed, f"{p}.q", f"{p}.k", f"{p}.v", bias=self._config.qkv_bias)
        if self._config.qk_norm:
            packed = self._qk_norm(packed, p)
        doubled = e.node("Gather", [packed, rows.doubled], f"{p}.queries", axis=1)
        key = e.input(f"past_key_{layer}", _FLOAT, self._cache_shape(g))
        value = e.input(f"past_value_{layer}", _FLOAT, self._cache_shape(g))
        absent = [
            ""
        ] * 7  # position_ids, attention_bias, head_sink, k_scale, v_scale, q_norm_weight, k_norm_weight
        inputs = [doubled, "", "", key, value, rows.valid_minus_one, rows.longest, rows.cos, rows.sin]
        attended, _, _ = e.nodes(
            "GroupQueryAttention", [*inputs, *absent, rows.query_lens],
            [f"{p}.attended", f"present_key_{layer}", f"present_value_{layer}"],
            domain=_CONTRIB, num_heads=g.query_heads, kv_num_heads=g.kv_heads, do_rotary=1, rotary_interleaved=0,
        )  # fmt: skip
        start = e.constant("slice.start", np.array([0], dtype=np.int64))
        axis = e.constant("slice.axis", np.array([1], dtype=np.int64))
        return e.node("Slice", [attended, start, rows.tokens, axis], f"{p}.single")

    def _qk_norm(self, packed: str, p: str) -> str:
        # Per head over head_dim; weights differ between query and key heads, so the norm itself has weight one.
        e, g = self._e, self._config.geometry
        normed_heads = g.query_heads + g.kv_heads
        weights = self._decoder.weights
        scale = np.repeat(
            np.stack([weights[f"{p}.q_norm"], weights[f"{p}.k_norm"]]), [g.query_heads, g.kv_heads], axis=0
        )
        sizes = e.constant("qk_norm.split", np.array([normed_heads * g.head_dim, g.kv_heads * g.head_dim]))
        qk, v = e.nodes("Split", [packed, sizes], [f"{p}.qk", f"{p}.v_only"], axis=2)
        by_head = e.constant("qk_norm.heads", np.array([0, 0, normed_heads, g.head_dim]))
        flat = e.constant("qk_norm.flat", np.array([0, 0, normed_heads * g.head_dim]))
        ones = e.constant("qk_norm.ones", np.ones(g.head_dim, dtype=np.float32))
        heads = e.node("Reshape", [qk, by_head], f"{p}.qk.heads")
        normed = e.node(
            "SimplifiedLayerNormalization",
            [heads, ones],
            f"{p}.qk.normed",
            epsilon=self._config.norm_eps,
            axis=-1,
        )
        scaled = e.node(
            "Mul", [normed, e.constant(f"{p}.qk_norm", scale.astype(np.float32))], f"{p}.qk.scaled"
        )
        return e.node(
            "Concat", [e.node("Reshape", [scaled, flat], f"{p}.qk.flat"), v], f"{p}.qkv.normed", axis=2
        )

    def _mlp(self, normed: str, layer: int) -> str:
        e, p = self._e, f"layers.{layer}"
        gate_up = self._linear(normed, f"{p}.gate", f"{p}.up", bias=False)
        gate, up = e.nodes("Split", [gate_up], [f"{p}.gate.out", f"{p}.up.out"], axis=2, num_outputs=2)
        active = e.node(
            "QuickGelu", [gate], f"{p}.gate.active", domain=_CONTRIB, alpha=1.0
        )  # alpha 1 is SiLU
        return self._linear(e.node("Mul", [active, up], f"{p}.gated"), f"{p}.down", bias=False)

    def _wanted(self, tensor: str, name: str) -> str:
        """Keep the tokens named by logit_indices: [B, T, H] → [B, R, H]."""
        return self._e.node("GatherND", [tensor, self._wanted_index], f"{name}.wanted", batch_dims=1)

    def _linear(self, x: str, *names: str, bias: bool) -> str:
        """X @ Wᵀ (+ bias) for one or several linears stacked along their outputs."""
        weights = self._decoder.weights
        out = f"{'+'.join(names)}.linear"
        bias_name = ""
        if bias:
            stacked = np.concatenate([weights[f"{name}.bias"] for name in names]).astype(np.float32)
            bias_name = self._e.constant(f"{out}.bias", stacked)
        if self._precision == "fp32":
            product = self._float_matmul(x, names, out)
            return self._e.node("Add", [product, bias_name], f"{out}.biased") if bias else product
        return self._quantised_matmul(x, names, out, bias_name)

    def _float_matmul(self, x: str, names: tuple[str, ...], out: str) -> str:
        weights = self._decoder.weights
        sizes = [weights[name].shape[0] for name in names]

        def make() -> Array:
            return np.concatenate([weights[name] for name in names]).astype(np.float32).T

        weight = self._e.weight(
            out.replace(".linear", ".weight"), _FLOAT, (self._width(names), sum(sizes)), make
        )
        return self._e.node("MatMul", [x, weight], out)

    def _width(self, names: tuple[str, ...]) -> int:
        return int(self._decoder.weights[names[0]].shape[1])

    def _quantised_matmul(self, x: str, names: tuple[str, ...], out: str, bias: str) -> str:
        bits = 8 if self._precision == "int8" else 4
        shape = (sum(self._decoder.weights[name].shape[0] for name in names), self._width(names))
        codes, scales = self._quantised_weight(out.removesuffix(".linear"), names, shape, bits)
        return self._nbits(x, (codes, scales, bias), out, shape=shape, bits=bits)

    def _nbits(
        self, x: str, weight: tuple[str, str, str], out: str, *, shape: tuple[int, int], bits: int
    ) -> str:
        blocks, scales, bias = weight
        inputs = [x, blocks, scales, *(("", "", bias) if bias else ())]
        return self._e.node(
            "MatMulNBits", inputs, out, domain=_CONTRIB, N=shape[0], K=shape[1], bits=bits, block_size=BLOCK,
            accuracy_level=_INT8_ACTIVATIONS,
        )  # fmt: skip

    def _quantised_weight(
        self, name: str, parts: tuple[str, ...], shape: tuple[int, int], bits: int
    ) -> tuple[str, str]:
        """Codes [out, blocks, bytes of a block] and scales [out, blocks] of linears stacked along their outputs."""
        weights = self._decoder.weights

        def made() -> QuantisedLinear:
            return quantise(np.concatenate([weights[part] for part in parts]), bits)

        memo = _Memo(made)
        rows, blocks = shape[0], shape[1] // BLOCK
        codes = self._e.weight(
            f"{name}.codes", _UINT8, (rows, blocks, BLOCK * bits // 8), lambda: memo.take().codes
        )
        scales = self._e.weight(f"{name}.scales", _FLOAT, (rows, blocks), lambda: memo.take().scales)
        return codes, scales

    def _embedding(self) -> str:
        e, g = self._e, self._config.geometry
        if self._precision == "fp32":
            weights = self._decoder.weights
            table = e.weight("embed", _FLOAT, (g.vocab_size, g.hidden), lambda: weights["embed"])
            return e.node("Gather", [table, "input_ids"], "embedded", axis=0)
        codes, scales = self._quantised_weight("embed", ("embed",), (g.vocab_size, g.hidden), 8)
        table = e.alias("embed.table", codes, (g.vocab_size, g.hidden))
        return e.node(
            "GatherBlockQuantized", [table, "input_ids", scales], "embedded", domain=_CONTRIB, bits=8,
            block_size=BLOCK, gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def _logits(self, normed: str) -> None:
        # The head keeps 8 bits even in int4: it is read once a step, and its errors go straight into the logits.
        e, g = self._e, self._config.geometry
        name = "embed" if self._config.tied_embedding else "lm_head"
        shape = (g.vocab_size, g.hidden)
        if self._precision != "fp32":
            codes, scales = f"{name}.codes", f"{name}.scales"
            if not self._config.tied_embedding:
                codes, scales = self._quantised_weight(name, (name,), shape, 8)
            self._nbits(normed, (codes, scales, ""), "logits", shape=shape, bits=8)
            return
        weights = self._decoder.weights
        table = (
            "embed" if self._config.tied_embedding else e.weight(name, _FLOAT, shape, lambda: weights[name])
        )
        flat = e.node("Reshape", [normed, e.constant("flat", np.array([-1, g.hidden]))], "normed.flat")
        product = e.node("Gemm", [flat, table], "logits.flat", transB=1)
        vocab = e.constant("vocab", np.array([g.vocab_size], dtype=np.int64))
        by_row = e.node(
            "Concat", [e.node("Shape", ["logit_indices"], "logits.rows"), vocab], "logits.shape", axis=0
        )
        e.node("Reshape", [product, by_row], "logits")


class _Memo:
    """Makes a quantised linear once for its codes and its scales, which are written one after the other."""

    def __init__(self, make: Callable[[], QuantisedLinear]) -> None:
        self._make = make
        self._made: QuantisedLinear | None = None

    def take(self) -> QuantisedLinear:
        made = self._made if self._made is not None else self._make()
        self._made = made if self._made is None else None  # the second take lets go of it
        return made
