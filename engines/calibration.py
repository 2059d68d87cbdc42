"""Runs a decoder in plain numpy over a short text to see how large each channel of its linears' inputs is.

Only quantisation uses this: weights are read one at a time, and nothing is kept but a root mean square per
channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engines.decoder import Decoder
from engines.rope import rotary_tables

Floats = npt.NDArray[np.float32]

# What people send: prose, numbers, code, questions, lists. 250 tokens are plenty for one number a channel.
TEXT = """Once upon a time, in a small village by the sea, there lived an old fisherman who had three \
daughters. Every morning he went out with his boat before the sun rose, and every evening he came home with \
what the sea had given him. The capital of France is Paris, and about 2,100,000 people lived there in 2019.

def add(a, b):
    \"\"\"Return the sum.\"\"\"
    return a + b

Q: How do I install the package? A: Run `pip install name`, then import it in your program. In mathematics, \
a prime number is a natural number greater than 1 that is not a product of two smaller natural numbers.
- First, heat the oven to 180 degrees.
- Then mix 200 g of flour with two eggs, and let it rest for half an hour.
"Hello, who are you?" she asked. "I am a helpful assistant. What can I do for you today?"
"""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Root mean squares of what a layer's linears read: [hidden], [heads·D], [hidden], [ffn]."""

    attention: Floats
    output: Floats
    mlp: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class LinearInputs:
    """Those of every layer, and of the head: [hidden]."""

    layers: tuple[LayerInputs, ...]
    head: Floats


def measure_inputs(decoder: Decoder, text: str = TEXT) -> LinearInputs:
    """Run `decoder` over `text`."""
    tokens = Tokenizer.from_str(decoder.tokenizer_json.decode()).encode(text, add_special_tokens=False).ids
    run = DecoderRun(decoder, positions=len(tokens))
    stream = decoder.weights["embed"][np.array(tokens)]
    layers = []
    for layer in range(decoder.config.geometry.layers):
        stream, seen = run.layer(stream, layer)
        layers.append(seen)
    return LinearInputs(tuple(layers), _rms(run.norm(stream, "norm")))


class DecoderRun:
    """Computes a decoder layer by layer in float32; `positions` is the length of the sequence it takes."""

    def __init__(self, decoder: Decoder, *, positions: int) -> None:
        self._config = decoder.config
        self._weights: Mapping[str, Floats] = decoder.weights
        self._cos, self._sin = rotary_tables(
            self._config.rope_inv_freq, positions, self._config.rope_attention_factor
        )
        self._unseen = np.triu(np.full((positions, positions), -np.inf, dtype=np.float32), 1)

    def layer(self, stream: Floats, layer: int) -> tuple[Floats, LayerInputs]:
        """One layer over the residual stream [T, hidden]."""
        p = f"layers.{layer}"
        normed = self.norm(stream, f"{p}.attn_norm")
        attended = self._attention(normed, p)
        stream = stream + self._linear(attended, f"{p}.o", bias=self._config.o_bias)
        mlp_input = self.norm(stream, f"{p}.mlp_norm")
        gate, up = self._linear(mlp_input, f"{p}.gate"), self._linear(mlp_input, f"{p}.up")
        gated = gate / (1 + np.exp(-np.clip(gate, -80, None))) * up
        stream = stream + self._linear(gated, f"{p}.down")
        return stream, LayerInputs(_rms(normed), _rms(attended), _rms(mlp_input), _rms(gated))

    def norm(self, x: Floats, name: str) -> Floats:
        """RMS norm over the last axis."""
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self._config.norm_eps))
        return np.asarray(x / scale * self._weights[name], dtype=np.float32)

    def _linear(self, x: Floats, name: str, *, bias: bool = False) -> Floats:
        product = x @ self._weights[name].T
        return product + self._weights[f"{name}.bias"] if bias else product

    def _attention(self, normed: Floats, p: str) -> Floats:
        """Causal attention of all positions: [T, heads·D]."""
        g, count = self._config.geometry, len(normed)
        q, k, v = (
            self._linear(normed, f"{p}.{name}", bias=self._config.qkv_bias).reshape(count, -1, g.head_dim)
            for name in "qkv"
        )
        if self._config.qk_norm:
            q, k = self.norm(q, f"{p}.q_norm"), self.norm(k, f"{p}.k_norm")
        q, k = self._rotate(q), self._rotate(k)
        out = np.empty_like(q)
        for head in range(g.query_heads):
            shared = head // (g.query_heads // g.kv_heads)
            scores = q[:, head] @ k[:, shared].T / np.float32(np.sqrt(g.head_dim)) + self._unseen
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, shared]
        return out.reshape(count, -1)

    def _rotate(self, x: Floats) -> Floats:
        first, second = np.split(x, 2, axis=-1)
        cos, sin = self._cos[:, None], self._sin[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rms(x: Floats) -> Floats:
    return np.asarray(np.sqrt(np.mean(x * x, axis=0)), dtype=np.float32)
