"""Traces of `tensorcache simulate`: refused by file and line, or read and written again equally."""

from scripts.simulate.trace_file import TraceError, read_trace
from tests.fuzz.contract import plain, scratch

_LINE = b'{"timestamp": 1, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2, -3]}\n'
EXAMPLES = (
    _LINE * 3,
    _LINE + b"\n \n" + b'{"hash_ids": []}\n',
    b'{"hash_ids": [' + b"9" * 5000 + b"]}",
    b'{"hash_ids": ' + b"[" * 20_000,
    b'{"hash_ids": [1], "timestamp": 1e999}',
    b'{"hash_ids": ["\xff"]}',
    b'{"\xff": 1}',
)


def target(data: bytes) -> None:
    path = scratch() / "trace.jsonl"
    path.write_bytes(data)
    heard: list[int] = []
    try:
        trace = read_trace(path, advance=heard.append)
    except TraceError as error:
        plain(error)
        assert sum(heard) <= len(data)
        return
    assert sum(heard) == len(data)
    assert trace.blocks == sum(len(trace.blocks_of(at)) for at in range(trace.requests)) > 0
    assert trace.distinct <= trace.blocks <= len(data)
