"""Reading traces that may hold anything."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import UsageError
from scripts.simulate import trace_file
from scripts.simulate.trace_file import Request, TraceError, read_trace, trace_of, write_trace

GOOD = '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [7, 8]}'


def written(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_requests_become_chains_of_numbers(tmp_path: Path) -> None:
    trace = read_trace(
        written(tmp_path, GOOD, '{"hash_ids": [7, 9]}', '{"hash_ids": []}', '{"hash_ids": [7]}')
    )
    assert [trace.blocks_of(request) for request in range(trace.requests)] == [[0, 1], [0, 2], [], [0]]
    assert (trace.requests, trace.blocks, trace.distinct, trace.foreign) == (4, 5, 3, 0)
    assert trace.title == "trace.jsonl"


def test_an_id_behind_another_prefix_is_another_block(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, '{"hash_ids": [1, 5, 5]}', '{"hash_ids": [2, 5]}'))
    assert trace.distinct == 5
    assert trace.foreign == 2
    assert len({*trace.names_of(0), *trace.names_of(1)}) == 5


@pytest.mark.parametrize("ids", [[0], [-1, -(2**127)], [2**127 - 1, 2**64, 2**63], [10**38]])
def test_odd_ids_are_ids(tmp_path: Path, ids: list[int]) -> None:
    trace = read_trace(written(tmp_path, json.dumps({"hash_ids": ids}), json.dumps({"hash_ids": ids})))
    assert trace.blocks_of(0) == trace.blocks_of(1) == list(range(len(ids)))


def test_what_is_not_needed_may_be_absent_or_more(tmp_path: Path) -> None:
    text = '{"hash_ids": [1], "session": {"a": [null]}, "timestamp": 27482.5}\r'
    assert read_trace(written(tmp_path, "", text, "   ", "")).blocks == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON that can be read (Input data was truncated): {"),
        ("not json", "is not JSON that can be read ("),
        (b"\x1f\x8b\x08\x00gzip", "is not JSON that can be read ("),
        (b'\xff\xfe{"hash_ids": []}', "is not JSON that can be read ("),
        (b'{"hash_ids": [], "timestamp": "\xff"}', "is not JSON that can be read ("),
        ('{"hash_ids": [1]} x', "trailing characters"),
        ('{"hash_ids": [NaN]}', "is not JSON that can be read ("),
        ('{"hash_ids": [1e999]}', "hash_ids[0]"),
        ('{"hash_ids": [' + "9" * 5000 + "]}", "hash_ids[0]"),
        ('{"hash_ids": [1], "x": ' + "[" * 100_000, "is not JSON that can be read ("),
        ("[1, 2]", "must be an object with hash_ids, got [1, 2]"),
        ("17", "must be an object with hash_ids, got 17"),
        ("null", "must be an object with hash_ids, got null"),
        ("{}", "hash_ids is missing: {}"),
        ('{"hash_id": [1]}', 'hash_ids is missing: {"hash_id": [1]}'),
        ('{"hash_ids": 5}', "hash_ids must be a list of whole numbers, got 5"),
        ('{"hash_ids": null}', "hash_ids must be a list of whole numbers, got null"),
        ('{"hash_ids": [1, 2.5]}', "hash_ids[1] must be a whole number, got 2.5"),
        ('{"hash_ids": [1, 2.0]}', "hash_ids[1] must be a whole number, got 2.0"),
        ('{"hash_ids": [true]}', "hash_ids[0] must be a whole number, got true"),
        ('{"hash_ids": ["a1"]}', 'hash_ids[0] must be a whole number, got "a1"'),
        ('{"hash_ids": [0, [1]]}', "hash_ids[1] must be a whole number, got [1]"),
        (json.dumps({"hash_ids": [2**127]}), f"hash_ids[0] must be less than 2^127 in size, got {2**127}"),
        (json.dumps({"hash_ids": [-(2**127) - 1]}), "hash_ids[0] must be less than 2^127 in size, got -170"),
        ('{"hash_ids": [1], "timestamp": "now"}', 'timestamp must be a number, got "now"'),
        ('{"hash_ids": [1], "input_length": 1.5}', "input_length must be a whole number, got 1.5"),
        ('{"hash_ids": [1], "output_length": null}', "output_length must be a whole number, got null"),
    ],
)
def test_a_bad_line_is_one_clear_error(tmp_path: Path, text: str | bytes, problem: str) -> None:
    path = written(tmp_path, GOOD, "", text, GOOD)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: line 3: ")
    assert problem in message
    assert len(message) < len(str(path)) + 250
    assert message.isprintable()
    assert isinstance(raised.value, UsageError)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"hash_ids": []}\n'])
def test_a_trace_without_a_block_is_refused(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, content)
    with pytest.raises(TraceError, match="there is no block in it"):
        read_trace(path)


def test_a_line_without_end_is_not_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "LONGEST_LINE", 100)
    long = '{"hash_ids": [' + ", ".join("1" * 40) + "]}"
    with pytest.raises(TraceError, match="line 2: must be at most 100 bytes long"):
        read_trace(written(tmp_path, GOOD, long))


def test_more_blocks_than_a_trace_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MOST_BLOCKS", 5)
    with pytest.raises(TraceError, match="line 3: hash_ids must end within 5 blocks"):
        read_trace(written(tmp_path, GOOD, GOOD, GOOD))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.jsonl"
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        assert read_trace(path).blocks > 0


def test_what_is_written_is_read(tmp_path: Path) -> None:
    requests = [Request(0, 600, 5, [1, 2]), Request(1500, 600, 7, [1, 3]), Request(1501, 0, 0, [])]
    path = tmp_path / "out.jsonl"
    write_trace(path, requests)
    first = path.read_text().splitlines()[0]
    assert first == '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'
    back, direct = read_trace(path), trace_of("out.jsonl", requests)
    assert (back.numbers, back.ends, back.names) == (direct.numbers, direct.ends, direct.names)


def test_a_trace_is_written_whole_or_not(tmp_path: Path) -> None:
    def broken() -> Iterator[Request]:
        yield Request(0, 1, 1, [1])
        raise KeyboardInterrupt

    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt):
        write_trace(path, broken())
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("target", ["/dev/null", "a file", "nothing yet"])
def test_a_link_is_written_through(tmp_path: Path, target: str) -> None:
    """/dev/stdout is a link, perhaps to a file: another file in its place would be there for everybody."""
    (tmp_path / "a file").write_text("before")
    link = tmp_path / "link"
    link.symlink_to(target if target.startswith("/") else tmp_path / target)
    write_trace(link, [Request(0, 1, 1, [1])])
    assert link.is_symlink()
    if not target.startswith("/"):
        assert read_trace(tmp_path / target).blocks == 1


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_trace(pipe, [Request(0, 1, 1, [1])])
        assert os.read(reader, 4096).endswith(b'"hash_ids": [1]}\n')
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
