"""Whole requests: any tensor of any type, shape and value under any name, and any parameter.

Bytes are read as: how many inputs, each a port and a tensor; then parameters, each a name and a scalar.
"""

from typing import Any

import numpy as np

from backend.errors import InvalidRequest
from backend.io import INPUTS, Port, PortType
from tests.backend.parsing.requests_made import CALLER, LIMITS, NOW, VOCAB, Inputs, parse
from tests.fuzz.contract import plain
from tests.fuzz.source import TEXTS, Source, as_json, chunked

_DTYPES = (
    "?", "b", "B", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", ">i4", "<c8", "S3", "U2",
    "O",
)  # fmt: skip
_SHAPES = ((1,), (0,), (3,), (), (1, 1), (1, 0), (2, 2))
_NAMES = (
    *(port.name for port in INPUTS), "timeout", "id", "api_key", "authorization", "priority", "random_seed",
    "triton_probe", "triton_x", "namespace", "principal", "TEXT_INPUT", "stop", "", "\x1b[31m", "\ud800",
    "a" * 300,
)  # fmt: skip
_PORTS = {port.name: at for at, port in enumerate(INPUTS)}


def _right(name: str, content: bytes) -> bytes:
    """An input as it should be."""
    return bytes([_PORTS[name], 0]) + content


_HELLO = _right("text_input", b"\x00" + chunked(b"hello there"))
EXAMPLES = (
    b"\x01" + _HELLO + b"\x00",
    b"\x02" + _HELLO + _right("temperature", b"\x00\x00\x02\xbc\x02") + b"\x01\x1a\x02\x01\x05",
    b"\x01" + _right("input_ids", b"\x05" + bytes(range(20))) + b"\x00",
    b"\x01" + _right("messages", b"\x00" + chunked(b'[{"role": "user", "content": "x"}]')) + b"\x00",
    b"\x02" + _HELLO + _right("sampling_parameters", b"\x00" + chunked(b'{"top_p": 0.5}')) + b"\x00",
    b"\x02" + _HELLO + _right("seed", b"\xff" * 8) + b"\x02\x1f\x02\x01\x07\x20\x04\x01\x0b",
    b"\x01" + _HELLO + bytes([1, _NAMES.index("cache_salt"), 4, 1, TEXTS.index("\ud800")]),
    b"\x02" + _HELLO + bytes([3, 1, 10, 0]) + b"\xff" * 64,
)


def target(data: bytes) -> None:
    source = Source(data)
    inputs: Inputs = {}
    for _ in range(source.byte() % 6):
        port = source.choice(INPUTS)
        wild = source.byte() % 4 == 1
        name = source.choice(_NAMES) if wild and source.byte() & 1 else port.name
        inputs[name] = _any_tensor(source) if wild else _tensor(port, source)
    parameters = {source.choice(_NAMES): source.scalar() for _ in range(source.byte() % 4)}
    given = {name: value for name, value in parameters.items() if value is not None}
    try:
        made = parse(inputs, given)
    except InvalidRequest as error:
        plain(error)
        return
    assert 1 <= len(made.prompt) < LIMITS.max_seq_len
    assert made.prompt.dtype == np.int64
    assert (made.prompt >= 0).all()
    assert "input_ids" not in inputs or (made.prompt < VOCAB).all()
    assert 0 <= made.min_tokens <= made.max_tokens <= LIMITS.max_seq_len - len(made.prompt)
    assert 0 <= made.sampling.seed < 2**64
    assert made.deadline is None or made.deadline > NOW
    assert made.namespace == CALLER.namespace, "a client chose its namespace"
    assert made.principal == CALLER.principal
    assert not made.probe or (made.max_tokens == 1 and len(made.prompt) <= 8)
    if not made.reads_cache and not made.writes_cache:
        assert not made.block_hashes
    made.prompt_text.encode()


def _tensor(port: Port, source: Source) -> np.ndarray[Any, Any]:
    """Of the right type and shape."""
    count = 1 if port.dims == (1,) else source.byte() % 70
    if port.type is PortType.BYTES:
        items = [_blob(source) for _ in range(count)]
        return np.array([*items, None], np.object_)[:-1]
    kind = np.dtype(port.type.numpy)
    if port.type is PortType.BOOL:
        return np.array([source.byte() & 1 for _ in range(count)], np.bool_)
    if kind.kind == "f":
        with np.errstate(over="ignore"):
            return np.array([source.number() for _ in range(count)]).astype(kind)
    limits = np.iinfo(kind)
    values = [source.byte() if source.byte() % 4 else source.integer() for _ in range(count)]
    return np.array([min(max(value, limits.min), limits.max) for value in values], kind)


def _blob(source: Source) -> bytes:
    kind = source.byte() % 3
    if kind == 0:
        return source.chunk()
    if kind == 1:
        return as_json(source.json()).encode()
    return source.text().encode("utf-8", "surrogatepass")


def _any_tensor(source: Source) -> np.ndarray[Any, Any]:
    shape, kind = source.choice(_SHAPES), np.dtype(source.choice(_DTYPES))
    count = int(np.prod(shape))
    if kind.hasobject:
        made = np.empty(count, np.object_)
        made[:] = [source.choice((source.chunk(), source.scalar(), source.json(1))) for _ in range(count)]
        return made.reshape(shape)
    raw = source.rest()[: count * kind.itemsize].ljust(count * kind.itemsize, b"\xff")
    if kind.kind == "U":
        return np.full(shape, "x", kind)
    if kind.kind == "b":
        return np.frombuffer(raw, np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(raw, kind).reshape(shape)
