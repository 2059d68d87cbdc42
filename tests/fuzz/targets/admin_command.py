"""Commands of an admin: InvalidRequest or JSON, and no file is made or removed but those of its folder."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from backend.access import EVERYBODY, Verb
from backend.admin.desk import AdminDesk
from backend.admin.public_prefixes import PublicPrefixes
from backend.errors import BackendError, InvalidRequest
from backend.open_release import OpenRelease
from cachemgr import NamespaceShare
from tests.fuzz.contract import plain, scratch
from tests.fuzz.source import Source

_ADMIN = replace(EVERYBODY, principal="root", verbs=frozenset(Verb))
_RELEASE = cast(
    OpenRelease,
    SimpleNamespace(
        read_prefix=lambda inputs: np.arange(40),
        spec=SimpleNamespace(block_tokens=16),
        cache=SimpleNamespace(usage=lambda: {"": 3, "org": 4}),
    ),
)


def _said(**fields: object) -> bytes:
    return b"\x00" + json.dumps(fields).encode()


EXAMPLES = (
    _said(command="public.add", name="handbook"),
    _said(command="public.remove", name="handbook"),
    _said(command="public.list"),
    _said(command="namespaces"),
    _said(command="hot"),
    _said(command="whoami"),
    _said(command="public.add", name="../outside"),
    _said(command="public.remove", name="../outside"),
    _said(command="public.add", name=".."),
    _said(command="public.add", name="\ud800"),
    _said(command="\x1b[31m"),
    _said(command=["whoami"]),
    b"\x00" + b"[" * 4000,
    b"\x00" + b'{"command": ' + b"9" * 4000 + b"}",
    b"\x01\x02\x01\x07",
)


@functools.cache
def _desk() -> AdminDesk:
    outside = scratch() / "public" / "outside.json"
    outside.parent.mkdir()
    outside.write_text("{}")
    public = PublicPrefixes(scratch() / "public", "model")
    return AdminDesk(public, shares=lambda: {"org": NamespaceShare()}, hot=lambda: {"00": 1.5})


def target(data: bytes) -> None:
    source = Source(data)
    command: Any = source.scalar() if source.byte() & 1 else source.rest().decode("utf-8", "replace")
    desk = _desk()
    try:
        answer = desk.answer(_ADMIN, command, {}, _RELEASE)
    except InvalidRequest as error:
        plain(error)
    except BackendError as error:
        plain(error)
    else:
        assert isinstance(json.loads(answer), dict)
        assert "\n" not in answer
        answer.encode()
    folder = scratch() / "public"
    assert {path.name for path in folder.iterdir()} <= {"outside.json", "model"}
    names = {path.name for path in (folder / "model").iterdir()} if (folder / "model").exists() else set()
    assert all(name.endswith(".json") and name.isascii() for name in names)
    for name in list(names)[8:]:  # a folder that is full would take no more
        (folder / "model" / name).unlink()
