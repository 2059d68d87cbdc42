"""Hugging Face folders: what is read from them, and what is refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.decoder import kv_digest
from engines.errors import BuildError
from engines.huggingface import load_huggingface
from engines.onnx_emit import as_bfloat16
from engines.rope import default_frequencies, parse_rope, rotary_tables, scaled_frequencies
from engines.safetensors_files import open_file, open_folder
from tests.engines.tiny_models import MODELS, TOKENIZER, edit_json, open_reference, save_tiny


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path)


def write_safetensors(path: Path, header: dict[str, Any], data: bytes) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


# -- what is read --


@pytest.mark.parametrize("name", MODELS)
def test_frequencies_equal_the_reference(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    config = load_huggingface(folder, max_seq_len=64).config
    rotary = open_reference(folder).model.rotary_emb
    np.testing.assert_allclose(config.rope_inv_freq, rotary.inv_freq.numpy(), rtol=3e-7)
    assert config.rope_attention_factor == pytest.approx(rotary.attention_scaling)


def test_tables_hold_the_scaled_angles() -> None:
    cos, sin = rotary_tables((1.0, 0.25), 9, 2.0)
    assert cos.shape == sin.shape == (9, 2)
    np.testing.assert_allclose(cos[8], 2 * np.cos([8.0, 2.0]), rtol=1e-6)
    np.testing.assert_allclose(sin[8], 2 * np.sin([8.0, 2.0]), rtol=1e-6)
    assert default_frequencies(100.0, 4).tolist() == pytest.approx([1.0, 0.1])


def test_configuration_and_weights_of_a_folder(llama: Path) -> None:
    decoder = load_huggingface(llama)
    config = decoder.config
    assert (config.architecture, config.context, config.tied_embedding) == ("llama", 256, True)
    assert (config.geometry.head_dim, config.geometry.kv_heads, config.geometry.vocab_size) == (16, 2, 96)
    assert (config.eos_token_ids, config.bos_token_id, config.add_bos) == ((2,), 1, False)
    assert json.loads(decoder.tokenizer_json) == TOKENIZER
    assert "lm_head" not in decoder.weights
    assert len(decoder.weights) == len(list(decoder.weights)) == 2 + 2 * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [False, True])
def test_weights_are_exact_in_every_stored_form(tmp_path: Path, dtype: torch.dtype, shards: bool) -> None:
    folder = save_tiny("qwen2", tmp_path, dtype=dtype, shards=shards)
    weights, state = load_huggingface(folder).weights, open_reference(folder).state_dict()
    pairs = {
        "embed": "model.embed_tokens.weight",
        "lm_head": "lm_head.weight",
        "layers.1.q.bias": "model.layers.1.self_attn.q_proj.bias",
        "layers.0.down": "model.layers.0.mlp.down_proj.weight",
        "layers.1.mlp_norm": "model.layers.1.post_attention_layernorm.weight",
    }
    for ours, theirs in pairs.items():
        assert weights[ours].dtype == np.float32
        assert np.array_equal(weights[ours], state[theirs].numpy()), ours


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.concatenate(
        [
            np.random.default_rng(1).standard_normal(10_000).astype(np.float32) * 1e3,
            np.array([0.0, -0.0, 1e-40, 3.4e38, np.inf, -np.inf, 1.00390625, 1.01171875], dtype=np.float32),
        ]
    )
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(as_bfloat16(values), expected)
    nan = np.array([0x7F800001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan((as_bfloat16(nan).astype(np.uint32) << 16).view(np.float32)).all()


def test_end_tokens_and_template(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[2, 7])
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(llama / "tokenizer_config.json", chat_template=named)
    decoder = load_huggingface(llama)
    assert (decoder.config.eos_token_ids, decoder.chat_template) == ((2, 7), "D")
    (llama / "chat_template.jinja").write_text("J")
    assert load_huggingface(llama).chat_template == "J"


def test_a_tokenizer_that_adds_bos(llama: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    processors = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    edit_json(llama / "tokenizer.json", post_processor=processors)
    assert load_huggingface(llama).config.add_bos
    edit_json(llama / "tokenizer_config.json", add_bos_token=False)
    assert not load_huggingface(llama).config.add_bos


def test_kv_digest_follows_what_kv_depends_on(llama: Path) -> None:
    plain = kv_digest(load_huggingface(llama).config)
    edit_json(llama / "config.json", eos_token_id=[2, 3])
    assert kv_digest(load_huggingface(llama).config) == plain
    edit_json(
        llama / "config.json", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    )
    assert kv_digest(load_huggingface(llama).config) != plain
    edit_json(
        llama / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rms_norm_eps=1e-6
    )
    assert kv_digest(load_huggingface(llama).config) != plain


def test_older_spellings_mean_the_same(llama: Path) -> None:
    edit_json(
        llama / "config.json", rope_parameters={"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}
    )
    new = load_huggingface(llama).config
    edit_json(
        llama / "config.json",
        rope_parameters=None,
        rope_theta=2e4,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    assert load_huggingface(llama).config == new


# -- lengths that decide --


def test_a_sliding_window_is_refused_unless_sequences_fit_inside(tmp_path: Path) -> None:
    folder = save_tiny("mistral-head-dim", tmp_path)
    with pytest.raises(BuildError, match=r"sliding_window: 64 with max_seq_len 256, supported: .* up to 64"):
        load_huggingface(folder)
    with pytest.raises(BuildError, match=r"sliding_window: 64 with max_seq_len 65"):
        load_huggingface(folder, max_seq_len=65)
    assert load_huggingface(folder, max_seq_len=64).config.context == 64


def test_dynamic_scaling_is_refused_beyond_the_trained_length(tmp_path: Path) -> None:
    folder = save_tiny("llama-dynamic", tmp_path)
    with pytest.raises(
        BuildError, match=r"rope_type: dynamic with max_seq_len 257, .* max_position_embeddings = 256"
    ):
        load_huggingface(folder, max_seq_len=257)
    assert load_huggingface(folder, max_seq_len=256).config.context == 256


# -- what is refused --


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "smollm3"}, "model_type: 'smollm3', supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type: None, supported: llama"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu, supported: silu"),
        ({"mlp_bias": True}, "mlp_bias: true, supported: false"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: gptq, supported: none"),
        ({"hidden_size": "64"}, r"config.json: Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0, supported: at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3, supported: divisors of 4 query heads"),
        ({"head_dim": 15}, "head_dim: 15, supported: even numbers"),
        ({"head_dim": 32}, r"q_proj.weight: shape \(64, 64\), supported by config.json: \(128, 64\)"),
        ({"num_hidden_layers": 3}, "layers.2.*: missing in the weights"),
        ({"num_hidden_layers": 1}, "layers.1.*: a weight that llama with this config.json lacks"),
        ({"attention_bias": True}, "q_proj.bias: missing in the weights"),
        (
            {"layer_types": ["chunked_attention"]},
            "layer_types: .'chunked_attention'., supported: full_attention",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": 96}, "eos_token_id: 96, supported: 0 … vocab_size − 1 = 95"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type: longrope, supported: default, linear, llama3",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: None, supported for linear"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor: 0.0, supported"),
        ({"rope_parameters": {"factr": 2.0}}, "rope_parameters: .*factr"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5, supported: 1.0"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta: 0.5, supported: a finite number above 1"),
    ],
)
def test_a_configuration_is_refused_by_name(llama: Path, changes: dict[str, Any], complaint: str) -> None:
    if "eos_token_id" in changes:
        (llama / "generation_config.json").unlink()
    edit_json(llama / "config.json", **changes)
    with pytest.raises(BuildError, match=complaint):
        load_huggingface(llama)


def test_llama3_scaling_needs_ordered_factors() -> None:
    settings = parse_rope(
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
        default_theta=1e4,
    )
    with pytest.raises(BuildError, match=r"high_freq_factor: 1.0, supported: above low_freq_factor 4.0"):
        scaled_frequencies(settings, head_dim=16, max_position_embeddings=64, max_seq_len=64)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(llama: Path, name: str) -> None:
    (llama / name).unlink()
    with pytest.raises(BuildError, match="safetensors" if name == "model.safetensors" else name):
        load_huggingface(llama)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_malformed_file_is_named(llama: Path, name: str, content: bytes) -> None:
    (llama / name).write_bytes(content)
    with pytest.raises(BuildError, match=f"{name}: .*supported: a JSON object"):
        load_huggingface(llama)


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        (
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
            bytes(4),
            "w: bytes 0…8 of 4, supported: 8",
        ),
        (
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            bytes(8),
            "w: bytes 0…4 of 8, supported: 8",
        ),
        ({"w": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, bytes(8), "w: bytes"),
        (
            {"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}},
            bytes(2),
            "w: dtype F8_E4M3, supported",
        ),
        ({"w": {"dtype": "F32", "shape": [2]}}, bytes(8), "header: .*data_offsets"),
        ({"w": 3}, bytes(8), "header: Expected `object`"),
    ],
)
def test_a_wrong_safetensors_header_is_refused(
    tmp_path: Path, header: dict[str, Any], data: bytes, complaint: str
) -> None:
    write_safetensors(tmp_path / "x.safetensors", header, data)
    with pytest.raises(BuildError, match=complaint):
        open_file(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "content", [b"", b"abc", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"{]"]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(BuildError, match=r"x.safetensors: .*supported: .*safetensors"):
        open_file(tmp_path / "x.safetensors")


def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    write_safetensors(tmp_path / "a.safetensors", header, bytes(4))
    assert list(open_folder(tmp_path)) == ["w"]
    index = tmp_path / "model.safetensors.index.json"
    edit_json(index, weight_map={"w": "../a.safetensors"})
    with pytest.raises(BuildError, match=r"file '../a.safetensors', supported: plain names"):
        open_folder(tmp_path)
    edit_json(index, weight_map={"v": "a.safetensors"})
    with pytest.raises(BuildError, match=r"v is not in a.safetensors"):
        open_folder(tmp_path)
    edit_json(index, weight_map=3)
    with pytest.raises(BuildError, match="weight_map"):
        open_folder(tmp_path)
