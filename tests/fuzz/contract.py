"""What a fuzz target is, and what all of them promise of an error.

A target is a module of tests.fuzz.targets with

    target(data)    feeds the bytes to the real reader; AssertionError, or whatever the reader lets out
                    that is not its documented error, is a finding
    EXAMPLES        inputs that the reader takes, to be mutated

The same targets are run by pytest (kept seeds, hypothesis) and by `make fuzz` (coverage-guided).
"""

import atexit
import functools
import importlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

HERE = Path(__file__).resolve().parent
SEEDS = HERE / "seeds"
LONGEST_ERROR = 1000
"""Characters of a line that a person has to read, or that a stranger has put into our log."""


class Target(Protocol):
    EXAMPLES: Sequence[bytes]

    def target(self, data: bytes) -> None: ...


def names() -> list[str]:
    """All targets."""
    return sorted(path.stem for path in (HERE / "targets").glob("[a-z]*.py"))


def load(name: str) -> Target:
    """The target of that name; a dotted one is a module of its own."""
    return cast(Target, importlib.import_module(name if "." in name else f"tests.fuzz.targets.{name}"))


def seeds(name: str) -> list[Path]:
    """What was found before, and what went deep."""
    return sorted((SEEDS / name).glob("*"))


def plain(
    error: Exception,
    *,
    longest: int = LONGEST_ERROR,
    begins: Sequence[str] = ("",),
    without: str | None = None,
) -> None:
    """AssertionError unless the text of `error` is one printable line of bounded length, and begins so."""
    text = str(error)
    assert text.startswith(tuple(begins)), text[:200]
    assert without is None or without not in text, "a secret is shown"
    assert text, "an error without a word"
    assert text.isprintable(), f"not one printable line: {text[:200]!r}"
    assert len(text) <= longest, f"{len(text)} characters: {text[:200]!r}"


@functools.cache
def scratch() -> Path:
    """A folder of this process for targets that read files; gone at its end."""
    folder = Path(tempfile.mkdtemp(prefix="tensorcache-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
