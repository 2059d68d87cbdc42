"""A parser over a small tokenizer, and inputs as Triton hands them over."""

import json
from dataclasses import replace
from typing import Any

import numpy as np

from backend.access import EVERYBODY
from backend.generation import Generation
from backend.parsing import RequestLimits, parse_generation
from backend.text import TextModel
from cachemgr import BlockHash
from tests.backend.text.tokenizers_made import byte_level

VOCAB = 300
LIMITS = RequestLimits(max_seq_len=64, vocab_size=VOCAB, default_max_tokens=16, max_prompt_bytes=2000)
NOW = 1000.0

Inputs = dict[str, np.ndarray[Any, Any]]


def make_text(template: str | None) -> TextModel:
    return TextModel.from_release(
        {"tokenizer.json": byte_level().to_str().encode()},
        chat_template=template, eos_token_ids=(), bos_token_id=None, add_bos=False,
    )  # fmt: skip


TEXT = make_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>")
NO_TEMPLATE = make_text(None)


class ShownHasher:
    """One name per four tokens, that shows what it was made of; what begins with token 1 is public."""

    def public_blocks(self, tokens: np.ndarray[Any, Any], *, salt: str = "") -> int:
        return int(len(tokens) >= 4 and tokens[0] == 1 and not salt)

    def hashes(
        self, tokens: np.ndarray[Any, Any], *, namespace: str, salt: str = "", public: int = 0
    ) -> list[BlockHash]:
        spaces = ["public"] * public + [namespace] * (len(tokens) // 4 - public)
        return [BlockHash(f"{space}/{salt}/{i}".encode()) for i, space in enumerate(spaces)]


CALLER = replace(EVERYBODY, namespace="ns")


def parse(inputs: Inputs, parameters: dict[str, Any] | None = None, *, text: TextModel = TEXT) -> Generation:
    return parse_generation(
        "r1", inputs, parameters or {},
        limits=LIMITS, text=text, hasher=ShownHasher(), caller=CALLER,
        clock=lambda: NOW, fresh_seed=lambda: 4711,
    )  # fmt: skip


def strings(*items: str | bytes) -> np.ndarray[Any, Any]:
    return np.array([item.encode() if isinstance(item, str) else item for item in items], dtype=np.object_)


def one(value: Any, kind: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.array([value], dtype=kind)


def hello(**more: np.ndarray[Any, Any]) -> Inputs:
    return {"text_input": strings("hello"), **more}


def sampling(text: str | dict[str, Any]) -> Inputs:
    return hello(sampling_parameters=strings(text if isinstance(text, str) else json.dumps(text)))
