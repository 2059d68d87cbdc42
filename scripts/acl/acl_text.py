"""What `tensorcache acl` appends to an acl file: TOML of one principal or one of its keys."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC

from backend.access import KeyEntry

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class NewPrincipal:
    """A principal that the file does not have yet; None: what the file's format says by default."""

    models: Sequence[str]
    namespace: str | None = None
    verbs: Sequence[str] | None = None


def principal_text(name: str, principal: NewPrincipal) -> str:
    """Its table."""
    lines = [f"[principals.{_key(name)}]", f"models = {_list(principal.models)}"]
    if principal.namespace is not None:
        lines.append(f"namespace = {_string(principal.namespace)}")
    if principal.verbs is not None:
        lines.append(f"verbs = {_list(principal.verbs)}")
    return "".join(f"{line}\n" for line in lines)


def key_text(name: str, key: KeyEntry) -> str:
    """One more key of the principal `name`."""
    lines = [
        f"[[principals.{_key(name)}.keys]]",
        f"id = {_string(key.id)}",
        f"sha256 = {_string(key.sha256)}",
    ]
    if key.expires is not None:
        lines.append(f"expires = {key.expires.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")
    return "".join(f"{line}\n" for line in lines)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(map(_string, items))}]"


def _string(text: str) -> str:
    """JSON's strings are TOML's, but for one character that TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
