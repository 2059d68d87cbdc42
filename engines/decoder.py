"""A Llama-family decoder as loaders hand it to graph builders: its configuration and its float32 weights.

Loaders (GGUF, Hugging Face folder) produce a `Decoder`; graph builders (onnxruntime, tensorrt) consume it.
Weight names are canonical and the same for every source; linear weights are [out, in], rotary halves are
*split* (Hugging Face order: dimension i pairs with i + D/2), whatever the file stored.

    embed                      [vocab, hidden]
    layers.{i}.attn_norm       [hidden]
    layers.{i}.q|k|v           [heads·D, hidden]      and layers.{i}.q|k|v.bias   [heads·D]   (Qwen2)
    layers.{i}.q_norm|k_norm   [D]                                                            (Qwen3)
    layers.{i}.o               [hidden, heads·D]      and layers.{i}.o.bias
    layers.{i}.mlp_norm        [hidden]
    layers.{i}.gate|up         [ffn, hidden]          layers.{i}.down [hidden, ffn]
    norm                       [hidden]
    lm_head                    [vocab, hidden]        absent when tied to `embed`
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from engines.contract import Geometry


class DecoderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hyper-parameters of a decoder. `rope_inv_freq` [D/2] holds the final frequencies, scaling applied."""

    architecture: str
    geometry: Geometry
    ffn: int
    norm_eps: float
    rope_inv_freq: tuple[float, ...]
    rope_attention_factor: float
    context: int
    tied_embedding: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder in memory: configuration, float32 weights by canonical name, tokenizer, chat template."""

    config: DecoderConfig
    weights: Mapping[str, npt.NDArray[np.float32]]
    tokenizer_json: bytes
    chat_template: str | None
    source: str


def kv_digest(config: DecoderConfig) -> bytes:
    """16 bytes over everything in the configuration that KV values depend on; a part of kv_identity.

    Stable across processes and versions: fields by name in a fixed order, floats in exact hexadecimal form.
    What only reads KV or text (eos, context, head tying) is left out: changing it keeps cached blocks valid.
    """
    geometry = msgspec.structs.asdict(config.geometry)
    fields = [f"{name}={geometry[name]}" for name in sorted(geometry)]
    fields += [
        f"ffn={config.ffn}",
        f"norm_eps={float(config.norm_eps).hex()}",
        f"rope_inv_freq={','.join(float(value).hex() for value in config.rope_inv_freq)}",
        f"rope_attention_factor={float(config.rope_attention_factor).hex()}",
        f"qkv_bias={config.qkv_bias}",
        f"o_bias={config.o_bias}",
        f"qk_norm={config.qk_norm}",
    ]
    return hashlib.blake2b("\n".join(fields).encode(), digest_size=16, person=b"decoder-kv").digest()


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical weight that a decoder of this configuration has, with its shape."""
    g = config.geometry
    query, kv = g.query_heads * g.head_dim, g.kv_heads * g.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (g.vocab_size, g.hidden), "norm": (g.hidden,)}
    if not config.tied_embedding:
        shapes["lm_head"] = (g.vocab_size, g.hidden)
    for layer in range(g.layers):
        p = f"layers.{layer}"
        shapes |= {f"{p}.attn_norm": (g.hidden,), f"{p}.mlp_norm": (g.hidden,)}
        shapes |= {f"{p}.q": (query, g.hidden), f"{p}.k": (kv, g.hidden), f"{p}.v": (kv, g.hidden)}
        shapes |= {f"{p}.o": (g.hidden, query), f"{p}.down": (g.hidden, config.ffn)}
        shapes |= {f"{p}.gate": (config.ffn, g.hidden), f"{p}.up": (config.ffn, g.hidden)}
        if config.qkv_bias:
            shapes |= {f"{p}.q.bias": (query,), f"{p}.k.bias": (kv,), f"{p}.v.bias": (kv,)}
        if config.o_bias:
            shapes[f"{p}.o.bias"] = (g.hidden,)
        if config.qk_norm:
            shapes |= {f"{p}.q_norm": (g.head_dim,), f"{p}.k_norm": (g.head_dim,)}
    return shapes
