"""Loads a Llama-family decoder from a Hugging Face folder: config.json, *.safetensors, tokenizer.json.

Supported are the dense architectures that differ only in biases, norms, head sizes and rotary scaling. What a
folder asks for beyond that is refused by name: a model that loads computes what its authors' code computes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from engines.contract import Geometry
from engines.decoder import Decoder, DecoderConfig, weight_shapes
from engines.errors import BuildError
from engines.huggingface_text import read_json, read_text_facts, token_ids
from engines.rope import parse_rope, scaled_frequencies
from engines.safetensors_files import StoredTensor, open_folder

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

_DEFAULT_THETA = 10_000.0
_DEFAULT_WINDOW = 4096  # what the reference code assumes where the key is missing
_TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

FloatArray: TypeAlias = npt.NDArray[np.float32]


class _Config(msgspec.Struct, frozen=True):
    """The fields of config.json that decide what is computed; others describe training or generation."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def load_huggingface(folder: Path, *, max_seq_len: int | None = None) -> Decoder:
    """Read the decoder in `folder` for sequences of up to `max_seq_len` (None: all the model was made for).

    Weights are read when they are asked for. BuildError names a field, its value and what is supported.
    """
    config = _read_config(folder)
    stored = open_folder(folder)
    wanted = max_seq_len if max_seq_len is not None else config.max_position_embeddings
    text = read_text_facts(
        folder,
        bos=config.bos_token_id,
        eos=token_ids("eos_token_id", config.eos_token_id),
        vocab_size=config.vocab_size,
    )
    geometry = _geometry(config)
    inv_freq, attention_factor = _rope(config, geometry.head_dim, wanted)
    tied = config.tie_word_embeddings
    decoder_config = DecoderConfig(
        architecture=config.model_type,
        geometry=geometry,
        ffn=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        rope_inv_freq=inv_freq,
        rope_attention_factor=attention_factor,
        context=_context(config, wanted),
        tied_embedding=_TOP_NAMES["lm_head"] not in stored if tied is None else tied,
        qkv_bias=config.model_type == "qwen2" or _declared_bias(config),
        o_bias=_declared_bias(config),
        qk_norm=config.model_type == "qwen3",
        eos_token_ids=text.eos_token_ids,
        bos_token_id=config.bos_token_id,
        add_bos=text.add_bos,
    )
    return Decoder(
        config=decoder_config,
        weights=_Weights(decoder_config, stored),
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        source=folder.name,
    )


class _Weights(Mapping[str, FloatArray]):
    """Canonical name → float32 array, read from the mapped files on every access."""

    def __init__(self, config: DecoderConfig, stored: Mapping[str, StoredTensor]) -> None:
        shapes = weight_shapes(config)
        self._stored: dict[str, StoredTensor] = {}
        for name, shape in shapes.items():
            source = _source_name(name)
            if source not in stored:
                raise BuildError(f"{source}: missing in the weights, supported: all of {config.architecture}")
            if stored[source].shape != shape:
                raise BuildError(f"{source}: shape {stored[source].shape}, supported by config.json: {shape}")
            self._stored[name] = stored[source]
        used = {tensor.name for tensor in self._stored.values()}
        surplus = sorted(name for name in stored if name not in used and not _may_be_ignored(name, config))
        if surplus:
            raise BuildError(f"{surplus[0]}: a weight that {config.architecture} with this config.json lacks")

    def __getitem__(self, name: str) -> FloatArray:
        return self._stored[name].as_float32()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _read_config(folder: Path) -> _Config:
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        raise BuildError(f"model_type: {model_type!r}, supported: {', '.join(ARCHITECTURES)}")
    try:
        config = msgspec.convert(raw, _Config)
    except msgspec.ValidationError as error:
        raise BuildError(f"config.json: {error}") from None
    if config.hidden_act != "silu":
        raise BuildError(f"hidden_act: {config.hidden_act}, supported: silu")
    if config.mlp_bias:
        raise BuildError("mlp_bias: true, supported: false")
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method")
        raise BuildError(f"quantization_config: {method}, supported: none, with float weights")
    return config


def _geometry(config: _Config) -> Geometry:
    heads = config.num_attention_heads
    sizes = {
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if config.num_key_value_heads is None else config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    for field, size in sizes.items():
        if size < 1:
            raise BuildError(f"{field}: {size}, supported: at least 1")
    kv_heads = sizes["num_key_value_heads"]
    if heads % kv_heads:
        raise BuildError(f"num_key_value_heads: {kv_heads}, supported: divisors of {heads} query heads")
    head_dim = config.hidden_size // heads if config.head_dim is None else config.head_dim
    if head_dim < 2 or head_dim % 2:
        raise BuildError(f"head_dim: {head_dim}, supported: even numbers")
    return Geometry(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
    )


def _declared_bias(config: _Config) -> bool:
    """`attention_bias` puts a bias on q, k, v and o alike, in the two architectures that know the field."""
    return config.attention_bias and config.model_type in ("llama", "qwen3")


def _rope(config: _Config, head_dim: int, max_seq_len: int) -> tuple[tuple[float, ...], float]:
    declared = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor}
    declared |= config.rope_scaling or config.rope_parameters or {}
    if config.original_max_position_embeddings is not None:
        declared["original_max_position_embeddings"] = config.original_max_position_embeddings
    settings = parse_rope(
        {key: value for key, value in declared.items() if value is not None}, default_theta=_DEFAULT_THETA
    )
    return scaled_frequencies(
        settings,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        max_seq_len=max_seq_len,
    )


def _context(config: _Config, max_seq_len: int) -> int:
    """How long sequences may become: attention here is over the whole sequence, so a window must cover it."""
    window = _window(config)
    if window is None:
        return config.max_position_embeddings
    if max_seq_len > window:
        raise BuildError(
            f"sliding_window: {window} with max_seq_len {max_seq_len}, supported: max_seq_len up to {window}"
        )
    return min(config.max_position_embeddings, window)


def _window(config: _Config) -> int | None:
    kinds = set(config.layer_types or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise BuildError(f"layer_types: {sorted(kinds)}, supported: full_attention")
    declared = config.sliding_window
    window = _DEFAULT_WINDOW if isinstance(declared, msgspec.UnsetType) else declared
    match config.model_type:
        case "mistral":
            return window
        case "qwen2" | "qwen3" if config.use_sliding_window or "sliding_attention" in kinds:
            return window
        case _:
            return None


def _source_name(name: str) -> str:
    """The name in a Hugging Face file of a canonical weight."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, kind, *bias = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{'bias' if bias else 'weight'}"


def _may_be_ignored(name: str, config: DecoderConfig) -> bool:
    """Old files carry rotary frequencies, some a copy of a tied head: the reference uses neither."""
    return name.endswith("rotary_emb.inv_freq") or (name == _TOP_NAMES["lm_head"] and config.tied_embedding)
