"""A small random decoder with every feature switchable, for tests that need no real text."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engines.contract import Geometry
from engines.decoder import Decoder, DecoderConfig, weight_shapes
from engines.rope import default_frequencies

VOCAB = 320


def random_decoder(
    *, seed: int = 1, tied: bool = True, qkv_bias: bool = False, o_bias: bool = False, qk_norm: bool = False,
    layers: int = 2, kv_heads: int = 2, query_heads: int = 4, head_dim: int = 32, context: int = 8192,
    ffn: int = 256, attention_factor: float = 1.0,
) -> Decoder:  # fmt: skip
    """Weights of about unit gain; the embedding is large, so that greedy margins are wide."""
    geometry = Geometry(
        layers=layers,
        hidden=128,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=VOCAB,
    )
    config = DecoderConfig(
        architecture="llama", geometry=geometry, ffn=ffn, norm_eps=1e-5,
        rope_inv_freq=tuple(float(np.float32(f)) for f in default_frequencies(10000.0, head_dim)),
        rope_attention_factor=attention_factor, context=context, tied_embedding=tied, qkv_bias=qkv_bias,
        o_bias=o_bias, qk_norm=qk_norm, eos_token_ids=(0,), bos_token_id=None, add_bos=False,
    )  # fmt: skip
    random = np.random.default_rng(seed)
    weights = {name: _weight(name, shape, random) for name, shape in weight_shapes(config).items()}
    return Decoder(
        config=config, weights=weights, tokenizer_json=_tokenizer_json(), chat_template=None, source="random"
    )


def _weight(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    values = random.standard_normal(shape)
    if name in ("embed", "lm_head"):
        return (values * 0.7).astype(np.float32)
    if "norm" in name:
        return (1 + 0.1 * values).astype(np.float32)
    if name.endswith(".bias"):
        return (0.3 * values).astype(np.float32)
    return (values * 1.5 / np.sqrt(shape[1])).astype(np.float32)


def _tokenizer_json() -> bytes:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *alphabet, *(f"Ġ{letter}" for letter in alphabet)][:VOCAB]
    merges = [("Ġ", token[1:]) for token in tokens if len(token) == 2 and token[0] == "Ġ"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str().encode()
