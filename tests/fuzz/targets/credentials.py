"""Credentials in the parameters of a request: one constant refusal, or the right caller."""

import functools
import json
import logging

from backend.access import Verb
from backend.access.acl_access import AclAccess, probe_credential
from backend.access.keys import digest_of
from backend.errors import AccessDenied
from tests.fuzz.contract import plain, scratch
from tests.fuzz.source import Source, chunked

_SECRET = "s" * 43
_RIGHT = f"key-1.{_SECRET}"
_PROBE_SECRET = bytes(range(32))
_PROBE = probe_credential(_PROBE_SECRET)
_REFUSED = str(AccessDenied("why"))
_FILE = f"""
[principals.alice]
models = ["smollm2"]
verbs = ["infer"]
keys = [{{ id = "key-1", sha256 = "{digest_of(_SECRET).hex()}" }}]
"""
_NAMES = (
    "api_key", "authorization", "Authorization", "API_KEY", "principal", "namespace", "authori\u017fation",
)  # fmt: skip
_VALUES = (
    _RIGHT, f"Bearer {_RIGHT}", f"bearer\t{_RIGHT} ", _PROBE, "@probe.x", "@probe.\ud800", "Bearer ", "",
)
EXAMPLES = (
    b"\x01\x00\x01\x00\x00",
    b"\x01\x00\x01\x01\x01",
    b"\x01\x00\x01\x00\x03",
    b"\x02\x00\x01\x00\x00\x01\x01\x01",
    b"\x01\x01\x01\x00\x00",

    b"\x01\x00\x00\x00\x04\x00" + chunked(f"{_RIGHT}\n".encode()) + b"\x00",
)


@functools.cache
def _access() -> AclAccess:
    logging.getLogger("backend.access").setLevel(logging.CRITICAL)
    path = scratch() / "acl.toml"
    path.write_text(_FILE)
    path.chmod(0o600)
    return AclAccess("smollm2", path, probe_secret=_PROBE_SECRET, now=lambda: 1.8e9)


def target(data: bytes) -> None:
    source = Source(data)
    count, verb = source.byte() % 4, source.choice((Verb.INFER, Verb.ADMIN, Verb.CACHE_READ))
    parameters = {}
    for _ in range(count):
        ours = source.byte() & 1
        name = source.name(_NAMES)
        parameters[name] = source.choice(_VALUES) if ours else source.scalar()
    given = json.loads(json.dumps({name: value for name, value in parameters.items() if value is not None}))
    try:
        caller = _access().authorise(given, verb=verb)
    except AccessDenied as denied:
        plain(denied, begins=[_REFUSED], longest=len(_REFUSED))
        return
    shown = [str(value) for name, value in given.items() if name.lower() in ("api_key", "authorization")]
    assert shown, "let in without a credential"
    assert verb is Verb.INFER, "a verb that was not given"
    if caller.probe_only:
        assert all(_PROBE in value for value in shown)
    else:
        assert caller.principal == caller.namespace == "alice"
        assert all(_RIGHT in value for value in shown)
