"""Reads the decoder of a tokenizer.json into a table of what every token id stands for.

Supported: ByteLevel; Metaspace; and Replace … ByteFallback, Fuse, Strip in that order, each optional: what
the tokenizers of Llama, Mistral, Qwen, SmolLM, Gemma and Phi are made of. Anything else is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from backend.errors import ConfigError
from backend.text.token_text import ByteLevelTable, FallbackTable, TokenTable

_CHUNK: Final = 4096
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


def read_token_table(tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> TokenTable:
    """The table for `tokenizer`, whose JSON holds `decoder`; ConfigError names one that is not supported."""
    steps = _flatten(decoder)
    tokens = _shown_tokens(tokenizer)
    kinds = [step["type"] for step in steps]
    table: TokenTable
    if kinds == ["ByteLevel"]:
        table = ByteLevelTable.of([b"" if token is None else _byte_level(token) for token in tokens])
    elif kinds == ["Metaspace"]:
        table = _metaspace_table(tokens, steps[0])
    else:
        table = _fallback_table(tokens, steps)
    _check(tokenizer, table, len(tokens))
    return table


def decode(table: TokenTable, ids: Sequence[int]) -> str:
    """The text of `ids` as a whole."""
    text = table.start()
    return "".join([*map(text.push, ids), text.flush()])


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise ConfigError("tokenizer.json: decoder: none is given, tokens cannot be joined to a text")
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _shown_tokens(tokenizer: Tokenizer) -> list[str | None]:
    """Token strings by id; None for special tokens and for ids that have none."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    special = {added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special}
    tokens = [tokenizer.id_to_token(index) for index in range(max(ids, default=-1) + 1)]
    return [None if token in special else token for token in tokens]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """The bytes of a token; one with a character outside the alphabet (an added token) stands for itself."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _metaspace_table(tokens: Sequence[str | None], step: Mapping[str, Any]) -> FallbackTable:
    mark: str = step["replacement"]
    pieces = [None if token is None else token.replace(mark, " ") for token in tokens]
    if step.get("prepend_scheme", "always") == "never":
        return FallbackTable(pieces, pieces, strip=0)
    first = [None if token is None else token.replace(mark, "") for token in tokens]
    return FallbackTable(pieces, first, strip=0)


def _fallback_table(tokens: Sequence[str | None], steps: Sequence[Mapping[str, Any]]) -> FallbackTable:
    order = ("Replace", "ByteFallback", "Fuse", "Strip")
    replacements: list[tuple[str, str]] = []
    done, byte_tokens, strip = 0, False, 0
    for step in steps:
        kind = step["type"]
        if kind not in order[done:] or (kind == "Strip" and order[done] != "Strip"):
            names = " → ".join(step["type"] for step in steps)
            raise ConfigError(f"tokenizer.json: decoder: {kind} is not supported here, got {names}")
        done = order.index(kind) + (kind in ("ByteFallback", "Fuse"))
        if kind == "Replace":
            replacements.append((_pattern(step), step["content"]))
        elif kind == "ByteFallback":
            byte_tokens = True
        elif kind == "Strip":
            strip = _leading_spaces(step)
    pieces = [None if token is None else _piece(token, replacements, byte_tokens) for token in tokens]
    return FallbackTable(pieces, pieces, strip)


def _pattern(step: Mapping[str, Any]) -> str:
    pattern: str | None = step["pattern"].get("String")
    if not pattern:
        raise ConfigError(f"tokenizer.json: decoder: Replace needs a plain string, got {step['pattern']!r}")
    return pattern


def _leading_spaces(step: Mapping[str, Any]) -> int:
    if step["content"] != " " or step["stop"] != 0:
        raise ConfigError(f"tokenizer.json: decoder: Strip may only drop leading spaces, got {dict(step)!r}")
    return int(step["start"])


def _piece(token: str, replacements: Sequence[tuple[str, str]], byte_tokens: bool) -> str | int:
    for old, new in replacements:
        token = token.replace(old, new)
    value = _BYTE_TOKEN.fullmatch(token) if byte_tokens else None
    return token if value is None else int(value[1], 16)


def _check(tokenizer: Tokenizer, table: TokenTable, size: int) -> None:
    """Every id decodes as the library decodes it: a surprise must not wait for the first request."""
    for first in range(0, size, _CHUNK):
        ids = list(range(first, min(first + _CHUNK, size)))
        if decode(table, ids) != tokenizer.decode(ids, skip_special_tokens=True):
            raise ConfigError(f"tokenizer.json: decoder: ids {ids[0]} to {ids[-1]} decode unlike tokenizers")
