"""acl.toml and credentials: ConfigError that quotes no key, and no caller but for the very credential."""

import json

from backend.access import Verb
from backend.access.acl import Acl
from backend.access.acl_schema import MAX_MIN_SHARES, MAX_NAMESPACES, parse_acl
from backend.access.keys import digest_of
from backend.errors import AccessDenied, ConfigError
from tests.fuzz.contract import plain
from tests.fuzz.source import Source, chunked

_SECRET = "s" * 43
_RIGHT = f"key-1.{_SECRET}"
_SHOWN = "hunter2"
_NOW = 1.8e9
_FILE = f"""
[principals.alice]
models = ["smollm2", "llama-*"]
verbs = ["infer", "cache.read", "admin"]
namespace = "org_1"
requests_per_s = 5
concurrent = 3
keys = [{{ id = "key-1", sha256 = "{digest_of(_SECRET).hex()}", expires = 2099-01-01T00:00:00Z }}]
[principals.bob]
models = ["*"]
hide_cached_tokens = true
[namespaces.org_1]
quota = 0.5
min_share = 0.25
""".encode()
EXAMPLES = (
    b"\x00" + _FILE,
    b"\x00" + b"[principals]\nx = " + b"[" * 20_000,
    b"\x00" + b"[principals.x]\nconcurrent = " + b"9" * 10_000,
    b"\x00" + b'[principals."\\u001b[31m"]\nmodels = ["*"]',
    b"\x00" + b"[principals.x]\nmodels = [" + b'"*",' * 2000 + b"]",
    b"\x00" + _FILE.replace(b"2099-01-01T00:00:00Z", b"0001-01-01T00:00:00+23:59"),
    b"\x00" + _FILE + b"[namespaces.bob]\nmin_share = 0.8\n",
    b"\x01\x02\x01" + chunked(b"sha256") + b"\x00" + b"\x00\x05",
    b"\x01\x04\x01\x03",
    b"\x02" + _RIGHT.encode(),
    b"\x02key-1." + b"t" * 43,
    b"\x02nobody." + b"s" * 43,
)


def target(data: bytes) -> None:
    source = Source(data)
    kind = source.byte() % 3
    try:
        if kind == 2:
            _find(source.rest().decode("utf-8", "replace"))
            return
        text = source.rest().decode("utf-8", "replace") if kind == 0 else _with_key(source)
        acl = parse_acl(text, "acl.toml")
    except ConfigError as error:
        plain(error, begins=["acl.toml: "], without=_SHOWN if kind else None)
        return
    _holds(acl)
    assert kind or repr(acl).isprintable()
    assert not kind or _SHOWN not in repr(acl.principals)


def _holds(acl: Acl) -> None:
    spaces = {principal.namespace for principal in acl.principals.values()}
    assert acl.shares.keys() == spaces
    assert len(spaces) <= MAX_NAMESPACES
    assert sum(share.min_share for share in acl.shares.values()) <= MAX_MIN_SHARES + 1e-6
    for principal in acl.principals.values():
        assert principal.verbs <= frozenset(Verb)
        assert not principal.name.startswith("@")
        assert isinstance(principal.may_use("smollm2" * 8), bool)
        for key in principal.keys:
            assert len(key.digest) == 32
            assert isinstance(key.expired(_NOW), bool)


def _with_key(source: Source) -> str:
    """A file with one key, in whose entry a secret was put where it does not belong."""
    fields = {}
    for _ in range(source.byte() % 4):
        name = source.name(("id", "sha256", "expires", "note"))
        kind = source.byte() % 4
        fields[name] = (_SHOWN, "key-1", [_SHOWN], "")[kind] or f"{_SHOWN}{source.text()}"
    pairs = ", ".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in fields.items())
    return f'[principals.p]\nmodels = ["*"]\nkeys = [{{ {pairs} }}]\n'


def _find(credential: str) -> None:
    acl = parse_acl(_FILE.decode(), "acl.toml")
    try:
        caller = acl.find(credential, now=_NOW)
    except AccessDenied as denied:
        plain(denied, begins=["access denied: "], without=credential if len(credential) > 20 else None)
        assert credential != _RIGHT
    else:
        assert credential == _RIGHT
        assert caller.principal == "alice"
        assert caller.namespace == "org_1"
        assert caller.verbs == {Verb.INFER, Verb.CACHE_READ, Verb.ADMIN}
