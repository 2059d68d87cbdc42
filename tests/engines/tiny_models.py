"""Small random decoders saved by transformers itself: folders to load, and the reference to compare with."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 96
CONTEXT = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.2,
}

_FACTOR_4: dict[str, Any] = {"rope_theta": 1e4, "factor": 4.0}
_YARN = {**_FACTOR_4, "rope_type": "yarn", "original_max_position_embeddings": 64}

# name → (configuration class, what differs from _COMMON)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-no-gqa-bias": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {**_FACTOR_4, "rope_type": "linear"}}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": {**_FACTOR_4, "rope_type": "dynamic"}}),
    "llama-3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama-yarn-mscale": (
        "LlamaConfig",
        {
            "rope_parameters": {
                **_YARN,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "beta_fast": 16.0,
                "truncate": False,
            }
        },
    ),
    "llama-yarn-factor": ("LlamaConfig", {"rope_parameters": {**_YARN, "attention_factor": 1.3}}),
    "mistral-head-dim": ("MistralConfig", {"head_dim": 32, "sliding_window": 64}),
    "mistral-no-window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-bias": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
}

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(VOCAB)}, "merges": []},
}


def save_tiny(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, shards: bool = False) -> Path:
    """Save the model `name` with every parameter random, norms and biases too, so that none is forgotten."""
    kind, changes = MODELS[name]
    config = getattr(transformers, kind)(**{**_COMMON, **changes})
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB" if shards else "1GB")
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def open_reference(folder: Path) -> Any:
    """The folder as transformers loads it, computing in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content |= changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
