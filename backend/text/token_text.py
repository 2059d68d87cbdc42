"""Turns token ids into text one by one, as `tokenizers` decodes the whole list without special tokens.

Two families exist. In byte-level BPE every token is a few bytes of one UTF-8 stream. With SentencePiece and
byte fallback tokens are text, except that a run of `<0xNN>` tokens is UTF-8 as a whole: valid, or one U+FFFD
for each of its bytes. A run is therefore only known at its end.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"


class TokenText(Protocol):
    """Decodes one sequence of ids; `push` and `flush` return text that no later token can change."""

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        ...

    def flush(self) -> str:
        """The rest, as if the text ended here."""
        ...


class TokenTable(Protocol):
    """What every id stands for; starts decoders."""

    def start(self) -> TokenText:
        """A decoder at the beginning of a text."""
        ...


@dataclass(frozen=True, slots=True)
class ByteLevelTable:
    """Byte-level BPE: the bytes of every id; b"" for special tokens and ids without a token.

    `plain[id]` is the text of an id that is ASCII only: the common case needs no UTF-8 decoder.
    """

    pieces: Sequence[bytes]
    plain: Sequence[str | None]

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> "ByteLevelTable":
        """The table for `pieces`, indexed by id."""
        return cls(pieces, [piece.decode("ascii") if piece.isascii() else None for piece in pieces])

    def start(self) -> TokenText:
        """A decoder at the beginning of a text."""
        return _ByteLevelText(self)


class _ByteLevelText:
    __slots__ = ("_decode", "_open", "_pieces", "_plain")

    def __init__(self, table: ByteLevelTable) -> None:
        self._pieces = table.pieces
        self._plain = table.plain
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._open = False

    def push(self, token: int) -> str:
        if not 0 <= token < len(self._plain):
            return ""
        if not self._open:
            plain = self._plain[token]
            if plain is not None:
                return plain
        text = self._decode.decode(self._pieces[token])
        self._open = bool(self._decode.getstate()[0])
        return text

    def flush(self) -> str:
        self._open = False
        return self._decode.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class FallbackTable:
    """SentencePiece: `pieces[id]` is text, or the value of a byte token, or None (special, or no token).

    `first[id]` is the text where the token is the first of all; `strip` counts spaces dropped at the very
    start.
    """

    pieces: Sequence[str | int | None]
    first: Sequence[str | int | None]
    strip: int

    def start(self) -> TokenText:
        """A decoder at the beginning of a text."""
        return _FallbackText(self)


class _FallbackText:
    __slots__ = ("_first", "_pieces", "_run", "_strip")

    def __init__(self, table: FallbackTable) -> None:
        self._pieces = table.pieces
        self._first: Sequence[str | int | None] | None = table.first
        self._strip = table.strip
        self._run = bytearray()

    def push(self, token: int) -> str:
        pieces = self._first or self._pieces
        piece = pieces[token] if 0 <= token < len(pieces) else None
        if piece is None:
            return ""
        self._first = None
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._run:
            piece = self._end_run() + piece
        return self._stripped(piece) if self._strip else piece

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text
