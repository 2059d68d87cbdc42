"""tensorcache.toml and the parameters of config.pbtxt: ConfigError, or settings in their limits."""

from backend.errors import ConfigError
from backend.settings import read_facade_settings, read_model_settings, read_node_settings
from tests.fuzz.contract import plain, scratch
from tests.fuzz.source import Source, chunked

_TOML = b"""
[node]
cluster = "c"
id = "node-1"
[trust]
keys = ["release.pub"]
min_release = { smollm2 = 3 }
recheck_s = 60
[host]
bytes = 1_000_000
ttl_s = 60.0
directory = "/dev/shm"
[cluster]
listen = "127.0.0.1:7000"
members = [{ id = "node-1", address = "127.0.0.1:7000" }]
[redis]
url = "redis://:hunter2@127.0.0.1/0"
[lmdb]
path = "blocks"
max_bytes = 100000000
[log]
level = "debug"
"""
_KEYS = (
    "lanes", "max_seq_len", "cache", "swap", "drain_s", "tp_size", "facade_for", "max_open_requests",
)  # fmt: skip


def _pairs(kind: int, *pairs: tuple[int, bytes]) -> bytes:
    return bytes([kind]) + b"".join(bytes([key, 0]) + chunked(value) + b"\x00" for key, value in pairs)


EXAMPLES = (
    b"\x00" + _TOML,
    b"\x00" + b"a = " + b"[" * 20_000,
    b"\x00" + b"[a]\n" + b"[" + b"a." * 10_000 + b"a]\n",
    b"\x00" + b"host.bytes = " + b"9" * 100_000,
    b'\x00["\\u001b[31m"]\nx = 1',
    b'\x00[node]\nid = "' + b"x" * 5000 + b'"',
    b"\x00[host]\nttl_s = nan",
    _pairs(1, (0, b"4"), (3, b"drain"), (4, b"1e9")),
    _pairs(2, (6, b"smollm2"), (7, b"64")),
)


def target(data: bytes) -> None:
    source = Source(data)
    kind = source.byte() % 3
    try:
        if kind == 0:
            _read_toml(source.rest())
            return
        parameters: dict[str, str] = {}
        while source:
            name = source.name(_KEYS)
            parameters[name] = source.text()
        if kind == 1:
            settings = read_model_settings(parameters)
            assert settings.tp_size == 1
            assert 0 <= settings.drain_s <= 3600
            assert settings.lane_ttl_s >= 0
        else:
            facade = read_facade_settings(parameters)
            assert 1 <= facade.max_open_requests <= 1024
            assert 0 < facade.answer_timeout_s <= 86_400
    except ConfigError as error:
        plain(error)


def _read_toml(content: bytes) -> None:
    path = scratch() / "tensorcache.toml"
    path.write_bytes(content)
    node = read_node_settings(path)
    assert node.cache.ttl_s > 0
    assert all(least >= 0 for least in node.trust.min_release.values())
    assert node.log_level in ("info", "debug")
    assert all(name == name.lower() for name in node.forwarded_headers)
