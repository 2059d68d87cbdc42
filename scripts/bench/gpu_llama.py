"""A decoder of Llama-3-8B's shape with random weights: for speed and room, where no real 8B model is at hand.

A weight is made when it is asked for and kept by nobody, so that a builder which takes one at a time never
holds more than the largest of them, 2.1 GB in float32. A name gives the same values in every process.
"""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from engines.contract import Geometry
from engines.decoder import Decoder, DecoderConfig, weight_shapes
from engines.rope import default_frequencies

LLAMA_3_8B = DecoderConfig(
    architecture="llama",
    geometry=Geometry(layers=32, hidden=4096, query_heads=32, kv_heads=8, head_dim=128, vocab_size=128_256),
    ffn=14_336,
    norm_eps=1e-5,
    rope_inv_freq=tuple(float(np.float32(f)) for f in default_frequencies(500_000.0, 128)),
    rope_attention_factor=1.0,
    context=8192,
    tied_embedding=False,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
    eos_token_ids=(0,),
    bos_token_id=None,
    add_bos=False,
)

_LINEAR_GAIN = 1.0
_EMBEDDING_SCALE = 0.7  # large, so that the best token stands out as a golden token must


class RandomWeights(Mapping[str, npt.NDArray[np.float32]]):
    """Uniform values of unit gain by canonical name; norms are ones."""

    def __init__(self, config: DecoderConfig) -> None:
        self._shapes = weight_shapes(config)

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        """Made anew at every call."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        values = np.random.default_rng(seed).random(shape, dtype=np.float32)
        deviation = _EMBEDDING_SCALE if name in ("embed", "lm_head") else _LINEAR_GAIN / np.sqrt(shape[1])
        values -= 0.5
        values *= np.float32(np.sqrt(12.0) * deviation)  # a uniform value in −½ … ½ deviates by 1/√12
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def random_llama(tokenizer_json: bytes, config: DecoderConfig = LLAMA_3_8B) -> Decoder:
    """The decoder, with a tokenizer that knows some of its tokens."""
    return Decoder(
        config=config,
        weights=RandomWeights(config),
        tokenizer_json=tokenizer_json,
        chat_template=None,
        source="random weights",
    )


def weight_count(config: DecoderConfig = LLAMA_3_8B) -> int:
    """How many numbers the weights are."""
    return sum(int(np.prod(shape)) for shape in weight_shapes(config).values())
