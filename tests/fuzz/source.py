"""Turns bytes into values, so that bytes alone reach what lies behind types and shapes."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

INTEGERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1e-45, 3.5e38, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", "hello", "true", "1", "0.5", "nan", "1e400", "9" * 40, "\x00", "\ud800", "\U0001f600", "\u202e",
    "a\nb", "[[[[", "{}", "null", "[]", "1" * 5000,
)  # fmt: skip


class Source:
    """Hands out what is in `data`; at its end, zeros and nothing."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Is anything left?"""
        return self._at < len(self._data)

    def byte(self) -> int:
        value = self._data[self._at] if self else 0
        self._at += 1
        return value

    def choice(self, options: Sequence[T]) -> T:
        return options[self.byte() % len(options)]

    def chunk(self) -> bytes:
        """A length, and so many bytes."""
        count = self.byte()
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def rest(self) -> bytes:
        part = self._data[self._at :]
        self._at = len(self._data)
        return part

    def text(self) -> str:
        if self.byte() & 1:
            return self.choice(TEXTS)
        return self.chunk().decode("utf-8", "surrogateescape" if self.byte() & 1 else "replace")

    def name(self, known: Sequence[str]) -> str:
        """A known one, or any."""
        at = self.byte() % (len(known) + 1)
        return known[at] if at < len(known) else self.text()

    def integer(self) -> int:
        if self.byte() & 1:
            return self.choice(INTEGERS)
        return int.from_bytes(self.chunk()[:16], "little", signed=True)

    def number(self) -> float:
        return self.choice(FLOATS) if self.byte() & 1 else self.integer() / 1000

    def scalar(self) -> bool | int | float | str | None:
        kind = self.byte() % 5
        makers = (lambda: None, lambda: bool(self.byte() & 1), self.integer, self.number, self.text)
        return makers[kind]()

    def json(self, depth: int = 3) -> Any:
        kind = self.byte() % 7 if depth else 0
        if kind == 5:
            return [self.json(depth - 1) for _ in range(self.byte() % 4)]
        if kind == 6:
            return {self.text(): self.json(depth - 1) for _ in range(self.byte() % 4)}
        return self.scalar()


def as_json(value: Any) -> str:
    """As a client may write it: lone surrogates as escapes."""
    return json.dumps(value)


def chunked(part: bytes) -> bytes:
    """What `Source.chunk` reads as `part`."""
    return bytes([min(255, len(part))]) + part[:255]
