"""Writes small GGUF files the way llama.cpp's converter lays decoders out."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engines.decoder import Decoder

_NAMES = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "mlp_norm": "ffn_norm", "gate": "ffn_gate",
    "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
_TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}


def metadata(decoder: Decoder, architecture: str) -> dict[str, Any]:
    config, g = decoder.config, decoder.config.geometry
    tokenizer = json.loads(decoder.tokenizer_json)["model"]
    a = architecture
    return {
        f"{a}.block_count": g.layers,
        f"{a}.context_length": config.context,
        f"{a}.embedding_length": g.hidden,
        f"{a}.feed_forward_length": config.ffn,
        f"{a}.attention.head_count": g.query_heads,
        f"{a}.attention.head_count_kv": g.kv_heads,
        f"{a}.attention.key_length": g.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{a}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(tokenizer["vocab"], key=tokenizer["vocab"].get),
        "tokenizer.ggml.token_type": [3] + [1] * (g.vocab_size - 1),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }


def tensors(decoder: Decoder, *, permuted: bool) -> dict[str, np.ndarray]:
    heads = {"q": decoder.config.geometry.query_heads, "k": decoder.config.geometry.kv_heads}
    out = {}
    for name, array in decoder.weights.items():
        if name in _TOP:
            out[_TOP[name]] = array
            continue
        _, layer, kind, *bias = name.split(".")
        if permuted and kind in heads:
            array = interleave(array, heads[kind])
        out[f"blk.{layer}.{_NAMES[kind]}.{'bias' if bias else 'weight'}"] = array
    return out


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows of `llama` models."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def write(path: Path, architecture: str, meta: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in meta.items():
        _add(writer, key, value)
    for name, array in weights.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
