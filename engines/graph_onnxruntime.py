"""Builds the contract graph for ONNX Runtime on CPU: grouped-query attention over in-place lanes.

    input_ids      int64 [B, T]       tokens; rows may be padded on the right
    write_indices  int64 [B]          first cache position written; at least 1 for an idle row
    query_lens     int32 [B]          tokens of the row that count, 0 = idle: its lane is left untouched
    logit_indices  int64 [B, R]       which tokens of the row want logits
    past_key_i     float32 [B, Hkv, S, D], and past_value_i: bound at the address of present_…_i
    logits         float32 [B, R, V]

Positions follow from write_indices and the attended range from the valid length, so the contract's
position_ids and kv_positions are absent.

Same bits whatever the split and the batch: the attention kernel works on blocks of an even number of queries,
and takes another path, which rounds differently, where one query is left over. So attention always sees an
even number: where a row has an odd one, its last query is doubled. The second lands one position beyond the
valid end (hence a scratch position after max_seq_len), where the next step overwrites it, and its output is
dropped. All other kernels used here compute rows independently of one another.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from onnx import TensorProto

from engines.decoder import Decoder
from engines.errors import BuildError
from engines.onnx_emit import EmittedGraph, GraphEmitter
from engines.onnx_linears import BLOCK, CONTRIB, FLOAT, BlockLinears, FloatLinears, Floats, Linears
from engines.rope import rotary_tables

Precision = Literal["int8", "int4", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("int8", "int4", "fp32")

_OPSETS = {"": 23, CONTRIB: 1}
_IR_VERSION = 10
_INT64 = int(TensorProto.INT64)
_INT32 = int(TensorProto.INT32)
_HEAD_DIM_MULTIPLE = 16
_FFN_MULTIPLE = 16  # elementwise kernels round a tail shorter than a vector differently


def build_onnxruntime_graph(
    decoder: Decoder, *, precision: Precision, positions: int, embed_divisor: Floats | None = None
) -> EmittedGraph:
    """The graph for lanes of up to `positions` cache positions. BuildError names what is unsupported.

    `embed_divisor` belongs to a smoothed decoder (see smoothing), which only quantised precisions take.
    """
    check_decoder(decoder, precision)
    emitter = GraphEmitter("tensorcache_onnxruntime")
    linears: Linears
    if precision == "fp32":
        assert embed_divisor is None, "a smoothed decoder in fp32"
        linears = FloatLinears(decoder, emitter)
    else:
        bits = 8 if precision == "int8" else 4
        linears = BlockLinears(decoder, emitter, bits=bits, embed_divisor=embed_divisor)
    return _DecoderGraph(decoder, emitter, linears, positions=positions).build()


def check_decoder(decoder: Decoder, precision: Precision) -> None:
    """Raise BuildError if no graph of this precision can be built."""
    config, g = decoder.config, decoder.config.geometry
    if precision not in PRECISIONS:
        raise BuildError(f"precision: must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if g.query_heads % g.kv_heads:
        raise BuildError(f"query_heads: must be a multiple of kv_heads {g.kv_heads}, got {g.query_heads}")
    wanted = {
        "head_dim": (g.head_dim, _HEAD_DIM_MULTIPLE),
        "ffn": (config.ffn, _FFN_MULTIPLE if precision == "fp32" else BLOCK),
        "hidden": (g.hidden, 1 if precision == "fp32" else BLOCK),
        "query_heads × head_dim": (g.query_heads * g.head_dim, 1 if precision == "fp32" else BLOCK),
    }
    for name, (value, multiple) in wanted.items():
        if value % multiple:
            raise BuildError(f"{name}: must be a multiple of {multiple} for {precision}, got {value}")


@dataclass(slots=True)
class _Rows:
    """Tensors that every layer shares: where queries are doubled, and how far each row's cache reaches."""

    doubled: str
    tokens: str
    query_lens: str
    last_valid: str
    longest: str
    cos: str
    sin: str


class _DecoderGraph:
    def __init__(self, decoder: Decoder, emitter: GraphEmitter, linears: Linears, *, positions: int) -> None:
        self._decoder = decoder
        self._config = decoder.config
        self._e = emitter
        self._linears = linears
        self._positions = positions

    def build(self) -> EmittedGraph:
        e, g = self._e, self._config.geometry
        e.input("input_ids", _INT64, ["B", "T"])
        e.input("write_indices", _INT64, ["B"])
        e.input("query_lens", _INT32, ["B"])
        e.input("logit_indices", _INT64, ["B", "R"])
        self._linears.logits(self._layers(self._rows()), "logits")
        e.output("logits", FLOAT, ["B", "R", g.vocab_size])
        for layer in range(g.layers):
            for kind in ("key", "value"):
                e.output(f"present_{kind}_{layer}", FLOAT, self._cache_shape())
        return e.finish(opsets=_OPSETS, ir_version=_IR_VERSION)

    def _layers(self, rows: _Rows) -> str:
        """All layers and the final norm: [B, R, hidden], rows whose logits are wanted."""
        layers = self._config.geometry.layers
        stream, branch = self._linears.embedding("input_ids", "embedded"), ""
        for layer in range(layers):
            p = f"layers.{layer}"
            normed, stream = self._add_norm(stream, branch, f"{p}.attn_norm")
            attended = self._attention(normed, layer, rows)
            if layer == layers - 1:  # the cache is complete: only wanted rows go on
                index = self._e.node("Unsqueeze", ["logit_indices", self._ints("last_axis", -1)], "wanted")
                attended = self._e.node("GatherND", [attended, index], "wanted.attended", batch_dims=1)
                stream = self._e.node("GatherND", [stream, index], "wanted.stream", batch_dims=1)
            branch = self._linears.linear(attended, (f"{p}.o",), bias=self._config.o_bias)
            normed, stream = self._add_norm(stream, branch, f"{p}.mlp_norm")
            branch = self._mlp(normed, p)
        return self._add_norm(stream, branch, "norm")[0]

    def _rows(self) -> _Rows:
        e = self._e
        zero, one, two = (e.constant(f"{n}", np.array(n, dtype=np.int64)) for n in (0, 1, 2))
        one32, two32 = (e.constant(f"{n}.int32", np.array(n, dtype=np.int32)) for n in (1, 2))
        shape = e.node("Shape", ["input_ids"], "ids.shape")
        tokens = e.node("Gather", [shape, one], "tokens", axis=0)
        queries = e.node("Add", [tokens, e.node("Mod", [tokens, two], "tokens.odd")], "queries")
        ramp = e.node("Range", [zero, queries, one], "ramp")
        odd = e.node("Mod", ["query_lens", two32], "odd")
        query_lens = e.node("Add", ["query_lens", odd], "query_lens.even")
        written = e.node("Cast", ["write_indices"], "written", to=_INT32)
        valid = e.node("Add", [written, query_lens], "valid")
        farthest = e.node("ReduceMax", [valid], "farthest", keepdims=0)
        # The kernel sizes its scratch by this, not by the room in the cache.
        longest = e.node("Max", [farthest, e.node("Cast", [queries], "queries.int32", to=_INT32)], "longest")
        return _Rows(
            doubled=e.node("Min", [ramp, e.node("Sub", [tokens, one], "last_token")], "doubled"),
            tokens=e.node("Reshape", [tokens, self._ints("vector", 1)], "tokens.vector"),
            query_lens=query_lens,
            last_valid=e.node("Sub", [valid, one32], "last_valid"),
            longest=longest,
            cos=self._rope("cos"),
            sin=self._rope("sin"),
        )

    def _rope(self, kind: Literal["cos", "sin"]) -> str:
        config, positions = self._config, self._positions
        tables = rotary_tables(config.rope_inv_freq, positions, config.rope_attention_factor)
        table = tables[0 if kind == "cos" else 1]
        return self._e.weight(f"rope.{kind}", FLOAT, table.shape, lambda: table)

    def _add_norm(self, stream: str, branch: str, name: str) -> tuple[str, str]:
        """RMS norm of stream + branch, and that sum."""
        e, epsilon = self._e, self._config.norm_eps
        gamma = e.constant(name, np.asarray(self._decoder.weights[name], dtype=np.float32))
        if not branch:
            out = e.node(
                "SimplifiedLayerNormalization", [stream, gamma], f"{name}.out", epsilon=epsilon, axis=-1
            )
            return out, stream
        out, _, _, total = e.nodes(
            "SkipSimplifiedLayerNormalization", [stream, branch, gamma],
            [f"{name}.out", "", "", f"{name}.sum"], domain=CONTRIB, epsilon=epsilon,
        )  # fmt: skip
        return out, total

    def _attention(self, normed: str, layer: int, rows: _Rows) -> str:
        e, g, p = self._e, self._config.geometry, f"layers.{layer}"
        packed = self._linears.linear(normed, (f"{p}.q", f"{p}.k", f"{p}.v"), bias=self._config.qkv_bias)
        if self._config.qk_norm:
            packed = self._qk_norm(packed, p)
        queries = e.node("Gather", [packed, rows.doubled], f"{p}.queries", axis=1)
        key = e.input(f"past_key_{layer}", FLOAT, self._cache_shape())
        value = e.input(f"past_value_{layer}", FLOAT, self._cache_shape())
        # position_ids, attention_bias, head_sink, k_scale, v_scale, q_norm_weight, k_norm_weight
        absent = [""] * 7
        inputs = [queries, "", "", key, value, rows.last_valid, rows.longest, rows.cos, rows.sin]
        attended, _, _ = e.nodes(
            "GroupQueryAttention", [*inputs, *absent, rows.query_lens],
            [f"{p}.attended", f"present_key_{layer}", f"present_value_{layer}"],
            domain=CONTRIB, num_heads=g.query_heads, kv_num_heads=g.kv_heads, do_rotary=1,
        )  # fmt: skip
        start, axis = self._ints("slice.start", 0), self._ints("slice.axis", 1)
        return e.node("Slice", [attended, start, rows.tokens, axis], f"{p}.undoubled")

    def _qk_norm(self, packed: str, p: str) -> str:
        """RMS norm of every query and key head over head_dim."""
        e, g, weights = self._e, self._config.geometry, self._decoder.weights
        heads = g.query_heads + g.kv_heads
        # Query and key heads have different weights, so the norm itself has weight one and they follow.
        own = np.repeat(
            np.stack([weights[f"{p}.q_norm"], weights[f"{p}.k_norm"]]), [g.query_heads, g.kv_heads], axis=0
        )
        sizes = self._ints("qk_norm.split", heads * g.head_dim, g.kv_heads * g.head_dim)
        qk, v = e.nodes("Split", [packed, sizes], [f"{p}.qk", f"{p}.v_only"], axis=2)
        split = self._ints("qk_norm.heads", 0, 0, heads, g.head_dim)
        by_head = e.node("Reshape", [qk, split], f"{p}.qk.heads")
        ones = e.constant("qk_norm.ones", np.ones(g.head_dim, dtype=np.float32))
        normed = e.node(
            "SimplifiedLayerNormalization", [by_head, ones], f"{p}.qk.normed",
            epsilon=self._config.norm_eps, axis=-1,
        )  # fmt: skip
        scaled = e.node("Mul", [normed, e.constant(f"{p}.qk_norm", own.astype(np.float32))], f"{p}.qk.scaled")
        joined = self._ints("qk_norm.flat", 0, 0, heads * g.head_dim)
        flat = e.node("Reshape", [scaled, joined], f"{p}.qk.flat")
        return e.node("Concat", [flat, v], f"{p}.qkv.normed", axis=2)

    def _mlp(self, normed: str, p: str) -> str:
        e = self._e
        both = self._linears.linear(normed, (f"{p}.gate", f"{p}.up"), bias=False)
        gate, up = e.nodes("Split", [both], [f"{p}.gate.out", f"{p}.up.out"], axis=2, num_outputs=2)
        active = e.node("QuickGelu", [gate], f"{p}.gate.active", domain=CONTRIB, alpha=1.0)  # alpha 1 is SiLU
        gated = e.node("Mul", [active, up], f"{p}.gated")
        return self._linears.linear(gated, (f"{p}.down",), bias=False)

    def _cache_shape(self) -> list[int | str]:
        return ["B", self._config.geometry.kv_heads, "S", self._config.geometry.head_dim]

    def _ints(self, name: str, *values: int) -> str:
        return self._e.constant(name, np.array(values, dtype=np.int64))
