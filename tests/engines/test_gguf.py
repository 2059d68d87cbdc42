"""GGUF files become decoders: weights, rotary order, tokenizer, and one clear line where they cannot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engines.decoder import Decoder
from engines.errors import BuildError
from engines.gguf import load_gguf
from engines.gguf_tokenizer import tokenizer_json
from tests.engines import gguf_files
from tests.engines.random_decoder import random_decoder

FEATURES = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tied": False},
    "qwen3": {"qk_norm": True},
}


@pytest.fixture(params=FEATURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(architecture: str) -> Decoder:
    return random_decoder(**FEATURES[architecture])


def test_a_written_decoder_is_read_back(architecture: str, source: Decoder, tmp_path: Path) -> None:
    meta = gguf_files.metadata(source, architecture)
    weights = gguf_files.tensors(source, permuted=architecture == "llama")
    read = load_gguf(gguf_files.write(tmp_path / "m.gguf", architecture, meta, weights))
    assert set(read.weights) == set(source.weights)
    for name, array in source.weights.items():
        assert np.array_equal(read.weights[name], array), name
    assert read.config.geometry == source.config.geometry
    assert read.config.rope_inv_freq == source.config.rope_inv_freq
    assert read.config.norm_eps == pytest.approx(source.config.norm_eps)
    for field in (
        "ffn",
        "context",
        "tied_embedding",
        "qkv_bias",
        "o_bias",
        "qk_norm",
        "eos_token_ids",
        "add_bos",
    ):
        assert getattr(read.config, field) == getattr(source.config, field), field
    assert (read.chat_template, read.source) == ("{{ messages }}", "m.gguf")
    assert encode(read.tokenizer_json, "hi a b") == encode(source.tokenizer_json, "hi a b")


def encode(tokenizer: bytes, text: str) -> list[int]:
    return list(Tokenizer.from_str(tokenizer.decode()).encode(text, add_special_tokens=False).ids)


def llama_file(tmp_path: Path, *, drop: str = "", add: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A file of a random llama decoder without the key or tensor `drop`, with tensors `add`, keys changed."""
    decoder = random_decoder()
    meta = gguf_files.metadata(decoder, "llama") | {
        key.replace("__", "."): value for key, value in changes.items()
    }
    weights = gguf_files.tensors(decoder, permuted=True) | (add or {})
    meta.pop(drop, None)
    weights.pop(drop, None)
    return gguf_files.write(tmp_path / "m.gguf", "llama", meta, weights)


def test_linear_rope_scaling_divides_the_frequencies(tmp_path: Path) -> None:
    path = llama_file(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    expected = np.array(random_decoder().config.rope_inv_freq) / 4
    assert np.allclose(load_gguf(path).config.rope_inv_freq, expected, rtol=1e-6)


def test_rope_factors_of_the_file_divide_each_frequency(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16).astype(np.float32)
    decoder = load_gguf(llama_file(tmp_path, add={"rope_freqs.weight": factors}))
    assert np.allclose(
        decoder.config.rope_inv_freq, np.array(random_decoder().config.rope_inv_freq) / factors
    )
    assert "rope_freqs.weight" not in decoder.weights


def test_end_of_turn_tokens_end_a_generation_too(tmp_path: Path) -> None:
    decoder = random_decoder()
    tokens = gguf_files.metadata(decoder, "llama")["tokenizer.ggml.tokens"]
    tokens[7], tokens[9] = "<|im_end|>", "<|eot_id|>"
    kinds = [3] + [1] * (len(tokens) - 1)
    kinds[7] = 3  # token 9 only looks like one: it is no control token
    path = llama_file(
        tmp_path,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__merges=["Ġ !"],
    )
    assert load_gguf(path).config.eos_token_ids == (0, 7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"llama__rope__scaling__type": "yarn"},
            r"llama\.rope\.scaling\.type: must be none or linear, got 'yarn'",
        ),
        ({"llama__rope__dimension_count": 8}, r"rope\.dimension_count: must equal head_dim 32, got 8"),
        ({"llama__expert_count": 4}, r"llama\.expert_count: .* not supported"),
        ({"drop": "llama.block_count"}, r"llama\.block_count: missing in m\.gguf"),
        ({"drop": "tokenizer.ggml.tokens"}, r"tokenizer\.ggml\.tokens: missing"),
        ({"drop": "blk.1.attn_q.weight"}, r"layers\.1\.q: missing"),
        (
            {"add": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
            r"blk\.0\.attn_sinks\.weight: .*unsupported",
        ),
        (
            {"add": {"output_norm.weight": np.zeros(64, np.float32)}},
            r"norm: expected shape \[128\], got \[64\]",
        ),
        (
            {"tokenizer__ggml__model": "rwkv"},
            r"tokenizer\.ggml\.model: must be one of gpt2, llama, got 'rwkv'",
        ),
        ({"tokenizer__ggml__pre": "tekken"}, r"tokenizer\.ggml\.pre: must be one of .*, got 'tekken'"),
        ({"tokenizer__ggml__merges": ["Ġ nosuchtoken"]}, r"tokenizer\.ggml\.merges: .*nosuchtoken"),
        (
            {"tokenizer__ggml__token_type": [1, 1]},
            r"tokenizer\.ggml\.token_type: expected 320 entries, got 2",
        ),
    ],
)
def test_what_is_unsupported_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=said):
        load_gguf(llama_file(tmp_path, **changes))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", "falcon", {}, {})
    with pytest.raises(
        BuildError, match=r"general\.architecture: must be one of llama, qwen2, qwen3, got 'falcon'"
    ):
        load_gguf(path)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"not a model at all, but long enough to have a header of some kind"]
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(BuildError, match=r"m\.gguf: not a readable GGUF file"):
        load_gguf(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"none\.gguf: not a readable GGUF file"):
        load_gguf(tmp_path / "none.gguf")


DEMO_IDS = {
    "Hello world": [19556, 905],
    "1234567 x12": [33, 34, 35, 36, 37, 38, 39, 1792, 33, 34],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "  leading": [216, 2899],
}


def test_the_demo_tokenizer_gives_the_ids_its_model_was_trained_on(demo_decoder: Decoder) -> None:
    """Ids of the tokenizer published with the model."""
    assert {text: encode(demo_decoder.tokenizer_json, text) for text in DEMO_IDS} == DEMO_IDS


@pytest.mark.parametrize(
    "text", ["naïve café 日本語", "👩‍👩‍👧 \n\n\t tab", "don't we're I'LL 3.14", "\x00\x7f", ""]
)
def test_the_demo_tokenizer_loses_nothing(text: str, demo_decoder: Decoder) -> None:
    tokenizer = Tokenizer.from_str(demo_decoder.tokenizer_json.decode())
    assert (
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        == text
    )


def test_the_demo_decoder_is_smollm2(demo_decoder: Decoder) -> None:
    config, g = demo_decoder.config, demo_decoder.config.geometry
    assert (g.layers, g.hidden, g.query_heads, g.kv_heads, g.head_dim, g.vocab_size) == (
        30,
        576,
        9,
        3,
        64,
        49152,
    )
    assert (config.context, config.tied_embedding, config.add_bos, config.bos_token_id) == (
        8192,
        True,
        False,
        1,
    )
    assert config.eos_token_ids == (2, 0)
    assert config.rope_inv_freq[0] == 1.0
    assert config.rope_inv_freq[-1] == pytest.approx(100000 ** (-62 / 64))
    assert "add_generation_prompt" in (demo_decoder.chat_template or "")


def test_sentencepiece_merges_follow_the_scores() -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "▁ab",
    ]
    scores = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -10.0, -11.0, -12.0, -2.0, -1.0, -3.0]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1],
    }
    made = tokenizer_json(meta)
    assert encode(made, "ab") == [13]
    assert encode(made, "abc") == [7, 8, 12], "bc scores higher than ab, so b joins c"
    assert encode(made, "a\n€") == [7, 8, 3, 4, 5, 6], "bytes stand in for what has no piece"
    tokenizer = Tokenizer.from_str(made.decode())
    assert tokenizer.decode([13, 7, 8, 3, 4, 5, 6]) == "ab a\n€"
    unprefixed = tokenizer_json(meta | {"tokenizer.ggml.add_space_prefix": False})
    assert encode(unprefixed, "ab") == [11]


def test_the_llama3_split_takes_known_words_whole() -> None:
    tokens = ["a", "b", "Ġ", "ab", "1", "2", "3", "12", "123"]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
    }
    made = tokenizer_json(meta | {"tokenizer.ggml.merges": []})
    assert encode(made, "ab") == [3], "no merge makes it, but it is in the vocabulary"
    assert encode(made, "1231") == [8, 4], "digits come in threes"
    qwen = tokenizer_json(meta | {"tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "qwen2"})
    assert encode(qwen, "123") == [4, 5, 6], "digits come one by one"
    assert json.loads(qwen)["normalizer"] == {"type": "NFC"}
