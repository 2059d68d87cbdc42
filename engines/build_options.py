"""What to build from a decoder, and what no engine can be built with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import msgspec

from engines.decoder import Decoder
from engines.engine_spec import cache_positions
from engines.errors import BuildError
from engines.graph_onnxruntime import Precision as OrtPrecision
from engines.graph_onnxruntime import check_decoder
from engines.manifest import MODEL_NAME, MODEL_NAME_RULE, TensorRTInfo
from engines.release_folder import shown

Target = Literal["onnxruntime", "tensorrt"]
Precision = Literal["int8", "int4", "fp32", "float16", "bfloat16"]
KvDtype = Literal["float32", "float16", "bfloat16"]

PRECISIONS: dict[Target, tuple[Precision, ...]] = {
    "onnxruntime": ("int8", "int4", "fp32"),
    "tensorrt": ("float16", "bfloat16", "int4"),
}
_KV_DTYPES: dict[Precision, KvDtype] = {"float16": "float16", "bfloat16": "bfloat16", "int4": "float16"}
_KV_ALIGNMENT = 256  # bytes; a lane's slice of a cache tensor must start at a multiple of it


class PlanOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How TensorRT builds a plan: choices that change its speed and where it runs, never what it means.

    `device` is the ordinal of the GPU. `workspace_bytes` bounds the scratch memory of one kernel (0: what the
    GPU has). `timing_cache` is a folder that keeps measured kernel times, so that the next build is shorter
    (None: nothing is kept). `built_for`: see `TensorRTInfo`.
    """

    device: int = 0
    workspace_bytes: int = 0
    timing_cache: Path | None = None
    built_for: Literal["gpu", "capability"] = "gpu"


class BuildOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to build. `lanes` and `max_seq_len` are defaults and bounds that opening a release may lower.

    `precision`: int8, int4 or fp32 for onnxruntime; float16, bfloat16 or int4 (weights; the rest is float16)
    for tensorrt.
    """

    target: Target = "onnxruntime"
    precision: Precision = "int8"
    lanes: int = 8
    max_seq_len: int = 4096
    block_tokens: int = 32
    max_prefill_tokens: int = 512
    plan: PlanOptions = PlanOptions()

    @property
    def positions(self) -> int:
        """S: what a lane is made of (see `cache_positions`)."""
        return cache_positions(self.max_seq_len, self.block_tokens)

    @property
    def kv_dtype(self) -> KvDtype:
        """The element type of lanes and blocks."""
        return "float32" if self.target == "onnxruntime" else _KV_DTYPES[self.precision]


@dataclass(frozen=True, slots=True)
class Built:
    """What the builder of a target left in the folder, and what the manifest says of it."""

    graph: str
    files: tuple[str, ...]
    weights_digest: str
    exact: bool
    kernel_class: str
    tensorrt: TensorRTInfo | None = None


def check_precision(options: BuildOptions) -> None:
    """Raise BuildError for an unknown target or precision: all that can be said without weights."""
    if options.target not in PRECISIONS:
        raise BuildError(f"target: must be one of {', '.join(PRECISIONS)}, got {options.target!r}")
    supported = PRECISIONS[options.target]
    if options.precision not in supported:
        known = f"one of {', '.join(supported)} for {options.target}"
        raise BuildError(f"precision: must be {known}, got {options.precision!r}")


def check_options(decoder: Decoder, options: BuildOptions, *, model: str, release: int) -> None:
    """Raise BuildError at the first option, or size of the decoder, that no engine can be built with."""
    config, g = decoder.config, decoder.config.geometry
    check_precision(options)
    if options.target == "onnxruntime":
        check_decoder(decoder, cast(OrtPrecision, options.precision))
    else:
        _check_plan(decoder, options)
    if not MODEL_NAME.fullmatch(model):
        raise BuildError(f"model: must be {MODEL_NAME_RULE}, got {shown(model)}")
    block = options.block_tokens
    if block < 8 or block > 512 or block & (block - 1):
        raise BuildError(f"block_tokens: must be a power of two in 8 … 512, got {block}")
    _in_range("release", release, 1, 2**53)
    _in_range("lanes", options.lanes, 1, 1024)
    _in_range("max_seq_len", options.max_seq_len, 2, config.context)
    _in_range("max_prefill_tokens", options.max_prefill_tokens, 2, options.max_seq_len)
    itemsize = 4 if options.kv_dtype == "float32" else 2
    lane = g.kv_heads * options.positions * g.head_dim * itemsize
    if lane % _KV_ALIGNMENT:
        raise BuildError(
            f"kv_heads × positions × head_dim: must fill a multiple of {_KV_ALIGNMENT} bytes, got {lane}"
        )


def _check_plan(decoder: Decoder, options: BuildOptions) -> None:
    g = decoder.config.geometry
    if g.query_heads % g.kv_heads:
        raise BuildError(f"query_heads: must be a multiple of kv_heads {g.kv_heads}, got {g.query_heads}")
    _in_range("workspace_bytes", options.plan.workspace_bytes, 0, 2**50)


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BuildError(f"{name}: must be in {low} … {high}, got {value}")
