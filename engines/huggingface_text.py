"""What a Hugging Face folder says about text: tokenizer, chat template, which tokens begin and end it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import BuildError

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Tokenizer bytes and what goes with them."""

    tokenizer_json: bytes
    chat_template: str | None
    add_bos: bool
    eos_token_ids: tuple[int, ...]


def read_text_facts(folder: Path, *, bos: int | None, eos: tuple[int, ...], vocab_size: int) -> TextFacts:
    """Read the folder; `bos` and `eos` are config.json's. generation_config.json wins over the latter."""
    if not (folder / TOKENIZER).is_file():
        raise BuildError(f"{TOKENIZER}: missing in {folder.name}, supported: a fast tokenizer")
    tokenizer = read_json(folder / TOKENIZER)
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    generation = read_json(folder / "generation_config.json", optional=True)
    ends = token_ids("generation_config.json: eos_token_id", generation.get("eos_token_id")) or eos
    for token in ends:
        if not 0 <= token < vocab_size:
            raise BuildError(f"eos_token_id: {token}, supported: 0 … vocab_size − 1 = {vocab_size - 1}")
    declared = settings.get("add_bos_token")
    adds_bos = declared if isinstance(declared, bool) else _starts_with(tokenizer, bos)
    return TextFacts(
        tokenizer_json=(folder / TOKENIZER).read_bytes(),
        chat_template=_chat_template(folder, settings),
        add_bos=adds_bos and bos is not None,
        eos_token_ids=ends,
    )


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object; BuildError names the file if it is missing (unless optional) or something else."""
    if optional and not path.is_file():
        return {}
    try:
        parsed = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(f"{path.name}: {error}, supported: a JSON object") from None
    if not isinstance(parsed, dict):
        raise BuildError(f"{path.name}: a {type(parsed).__name__}, supported: a JSON object")
    return parsed


def token_ids(field: str, value: object) -> tuple[int, ...]:
    """One id, a list of ids or none, as a tuple."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in ids):
        raise BuildError(f"{field}: {value!r}, supported: a token id or a list of them")
    return tuple(ids)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, or the field of tokenizer_config.json: a text or named texts, then the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    declared = settings.get("chat_template")
    if isinstance(declared, list):
        named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, dict)}
        declared = named.get("default")
    if declared is None or isinstance(declared, str):
        return declared
    raise BuildError("tokenizer_config.json: chat_template: supported: a text or a list of named texts")


def _starts_with(tokenizer: dict[str, Any], bos: int | None) -> bool:
    """Whether the tokenizer's own post-processor puts `bos` before a single text."""
    found = tokenizer.get("post_processor")
    steps = [found] if isinstance(found, dict) else []
    for step in steps:
        steps.extend(step.get("processors", []))  # a Sequence holds others
        if step.get("type") != "TemplateProcessing" or not step.get("single"):
            continue
        first = step["single"][0].get("SpecialToken", {}).get("id")
        if bos in step.get("special_tokens", {}).get(first, {}).get("ids", []):
            return True
    return False
