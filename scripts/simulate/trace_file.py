"""Traces in Mooncake's format: a JSON object a line, {timestamp, input_length, output_length, hash_ids}.

Only `hash_ids` is needed to replay one; keys that we do not know are passed over. Whatever a file says of
its own size is not believed: lines and the sum of all blocks have limits, and an error names file, line,
field and value.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from scripts.errors import UsageError
from scripts.simulate.trace import Trace, TraceBuilder
from scripts.whole_file import write_whole_parts

LONGEST_LINE = 16 << 20
MOST_BLOCKS = 64 << 20
_ID_LIMIT = 1 << 127
_SHOWN = 60
_Advance = Callable[[int], None]


class TraceError(UsageError):
    """The file is no trace; says where and why."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}: line {line}: {problem}" if line else f"{path}: {problem}")


class Request(msgspec.Struct, frozen=True):
    """One line: milliseconds since the trace began, tokens in and out, chained ids of the prompt's blocks."""

    timestamp: float = 0
    input_length: int = 0
    output_length: int = 0
    hash_ids: list[int] = msgspec.field(default_factory=list)


class _Line(msgspec.Struct):
    """What of a line is read."""

    hash_ids: list[int]
    timestamp: float = 0
    input_length: int = 0
    output_length: int = 0


def read_trace(path: Path, *, advance: _Advance = lambda nbytes: None) -> Trace:
    """The whole file; TraceError, OSError. `advance` hears of bytes as they are read."""
    builder = TraceBuilder(path.name)
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as file:
        for number, text in _lines(path, file):
            advance(len(text))
            if text.isspace():
                continue
            try:
                ids = decoder.decode(text).hash_ids
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise TraceError(path, number, _problem(text, error)) from None
            if ids and not -_ID_LIMIT <= min(ids) <= max(ids) < _ID_LIMIT:
                raise TraceError(path, number, _first_outside(ids))
            if builder.blocks + len(ids) > MOST_BLOCKS:
                raise TraceError(path, number, f"hash_ids must end within {MOST_BLOCKS:,} blocks of a trace")
            builder.add(ids)
    if not builder.blocks:
        raise TraceError(path, 0, "there is no block in it")
    return builder.done()


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """A whole file or none; a link, a pipe or a terminal is written to as it is, never replaced."""
    lines = (f"{json.dumps(msgspec.structs.asdict(request))}\n".encode() for request in requests)
    if path.is_symlink() or (
        path.exists() and not path.is_file()
    ):  # /dev/stdout is a link, perhaps to a file
        with path.open("wb") as file:
            file.writelines(lines)
        return
    write_whole_parts(path, lines)


def trace_of(title: str, requests: Iterable[Request]) -> Trace:
    """Requests that never were in a file."""
    builder = TraceBuilder(title)
    for request in requests:
        builder.add(request.hash_ids)
    return builder.done()


def size_of(path: Path) -> int | None:
    """Bytes to be read, if it is known beforehand."""
    return os.stat(path).st_size if path.is_file() else None


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while text := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(text) > LONGEST_LINE:
            raise TraceError(path, number, f"must be at most {LONGEST_LINE:,} bytes long")
        yield number, text


def _problem(text: bytes, error: Exception) -> str:
    """What is wrong with a line that could not be read."""
    try:
        line = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as worse:
        # a number no float holds is well-formed JSON, yet fails without its place: the first error has it
        reason = error if isinstance(error, msgspec.ValidationError) else worse
        return f"is not JSON that can be read ({_first_line(reason)}): {_start(text)}"
    if not isinstance(line, dict):
        return f"must be an object with hash_ids, got {_short(line)}"
    if "hash_ids" not in line:
        return f"hash_ids is missing: {_short(line)}"
    return _wrong_field(line) or f"{_first_line(error)}: {_short(line)}"


def _wrong_field(line: dict[str, Any]) -> str:
    ids = line["hash_ids"]
    if not isinstance(ids, list):
        return f"hash_ids must be a list of whole numbers, got {_short(ids)}"
    for index, block_id in enumerate(ids):
        if type(block_id) is not int:
            return f"hash_ids[{index}] must be a whole number, got {_short(block_id)}"
    for field in ("input_length", "output_length"):
        if field in line and type(line[field]) is not int:
            return f"{field} must be a whole number, got {_short(line[field])}"
    if type(line.get("timestamp", 0)) not in (int, float):
        return f"timestamp must be a number, got {_short(line['timestamp'])}"
    return ""


def _first_outside(ids: list[int]) -> str:
    index = next(at for at, block_id in enumerate(ids) if not -_ID_LIMIT <= block_id < _ID_LIMIT)
    return f"hash_ids[{index}] must be less than 2^127 in size, got {_short(ids[index])}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _start(text: bytes) -> str:
    """The beginning of a line that may hold anything, safe to print."""
    shown = text[:_SHOWN].decode(errors="replace").strip().encode("unicode_escape").decode()
    return shown if len(text) <= _SHOWN else f"{shown}…"
