"""The format of acl.toml: text → Acl, or one line that names the key, the limit and the value.

Invariant: what stands in a key's entry is never quoted; somebody may have put the secret there.
"""

import re
import tomllib
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import msgspec

from backend.access.acl import Acl, Principal
from backend.access.contract import Allowance, Verb
from backend.access.keys import KEY_ID_RULE, KeyEntry, is_key_id
from backend.errors import ConfigError
from cachemgr import NamespaceShare

T = TypeVar("T", bound=msgspec.Struct)

MAX_PRINCIPALS: Final = 1024
MAX_NAMESPACES: Final = 64
MAX_KEYS: Final = 16
MAX_GLOBS: Final = 64
MAX_MIN_SHARES: Final = 0.9
"""Of all namespaces together; the rest goes to whoever uses it."""
DEFAULT_MIN_SHARES: Final = 0.5
DEFAULT_VERBS: Final = (Verb.INFER, Verb.CACHE_READ, Verb.CACHE_WRITE)

_MAX_NAME = 63
_MAX_SHOWN = 120
_SLACK = 1e-9
_NAMESPACE = re.compile(r"[a-z0-9._-]{1,63}")
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_GOT = re.compile(r", got `[^`]*`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Glob = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Fa-f]{64}\Z")]
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _Principal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: Annotated[tuple[_Glob, ...], msgspec.Meta(min_length=1, max_length=MAX_GLOBS)]
    namespace: str | None = None
    verbs: tuple[Verb, ...] = DEFAULT_VERBS
    requests_per_s: _Rate | None = None
    tokens_per_s: _Rate | None = None
    concurrent: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    hide_cached_tokens: bool = False
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()


class _Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    quota: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    principals: dict[str, Any] = {}
    namespaces: dict[str, Any] = {}
    # each is converted by itself, because msgspec does not name the key of a dict


def parse_acl(text: str, where: str) -> Acl:
    """What `text` says; `where` is said first in a ConfigError."""
    try:
        return _acl(tomllib.loads(text))
    except ValueError as error:  # no TOML, or a number of more digits than Python reads
        problem = f"expected TOML, found: {_line(error)}"
    except RecursionError:
        problem = "expected TOML, found: nested too deep"
    except ConfigError as error:
        problem = str(error)
    raise ConfigError(f"{where}: {problem}")


def _acl(data: Mapping[str, Any]) -> Acl:
    file = _convert(data, _File, at="")
    if len(file.principals) > MAX_PRINCIPALS:
        raise ConfigError(f"principals: at most {MAX_PRINCIPALS}, found {len(file.principals)}")
    principals = {name: _principal(name, table) for name, table in file.principals.items()}
    writers = (who for who in principals.values() if Verb.CACHE_WRITE in who.verbs)
    namespaces = {principal.namespace for principal in writers}
    return Acl(principals, _shares(namespaces, file.namespaces))


def _principal(name: str, table: Any) -> Principal:
    at = f"principals.{_line(name)}"
    if not name or name.startswith("@"):
        raise ConfigError(f"{at}: a name that is empty or begins with @ is reserved: choose another one")
    if len(name) > _MAX_NAME or not name.isprintable() or " " in name:
        raise ConfigError(f"{at}: a name must be at most {_MAX_NAME} printable characters without spaces")
    said = _convert(table, _Principal, at=at)
    namespace = name if said.namespace is None else said.namespace
    if not _NAMESPACE.fullmatch(namespace):
        default = " (by default it is the name of the principal)" if said.namespace is None else ""
        raise ConfigError(
            f"{at}.namespace: must be 1 to 63 characters of a-z, 0-9, ., _ and -, "
            f"found {_line(namespace)!r}{default}"
        )
    return Principal(
        name,
        namespace,
        said.models,
        frozenset(said.verbs),
        allowance=Allowance(said.requests_per_s, said.tokens_per_s, said.concurrent),
        hides_cached_tokens=said.hide_cached_tokens,
        keys=tuple(_key(key, at=f"{at}.keys[{number}]") for number, key in enumerate(said.keys)),
    )


def _key(key: _Key, *, at: str) -> KeyEntry:
    if not is_key_id(key.id):
        raise ConfigError(f"{at}.id: must be {KEY_ID_RULE}, found {len(key.id)} characters")
    return KeyEntry(key.id, bytes.fromhex(key.sha256), key.expires)


def _shares(namespaces: set[str], tables: Mapping[str, Any]) -> dict[str, NamespaceShare]:
    if len(namespaces) > MAX_NAMESPACES:
        raise ConfigError(
            f"principals: at most {MAX_NAMESPACES} namespaces, found {len(namespaces)}: "
            f"let some principals share one"
        )
    for name in tables:
        if name not in namespaces:
            problem = f"no principal that may {Verb.CACHE_WRITE} has this namespace: remove it"
            raise ConfigError(f"namespaces.{_line(name)}: {problem}")
    shares = {name: _share(name, tables.get(name, {}), among=len(namespaces)) for name in sorted(namespaces)}
    total = sum(share.min_share for share in shares.values())
    if total > MAX_MIN_SHARES + _SLACK:
        raise ConfigError(
            f"namespaces: all min_share together must be at most {MAX_MIN_SHARES}, found {total:.3g} "
            f"(one that is not said is {DEFAULT_MIN_SHARES / len(namespaces):.3g} here)"
        )
    return shares


def _share(name: str, table: Any, *, among: int) -> NamespaceShare:
    at = f"namespaces.{name}"
    said = _convert(table, _Share, at=at)
    min_share = min(said.quota, DEFAULT_MIN_SHARES / among) if said.min_share is None else said.min_share
    if min_share > said.quota:
        raise ConfigError(f"{at}.min_share: must be at most the quota {said.quota}, found {min_share}")
    return NamespaceShare(quota=said.quota, min_share=min_share)


def _convert(data: Any, kind: type[T], *, at: str) -> T:
    """The table at the key `at` as a struct; the error names key, limit and value."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text = str(error)
    match = _AT.search(text)
    key, problem = (match.group(1), text[: match.start()]) if match else ("", text)
    if unknown := _UNKNOWN.fullmatch(problem):
        raise ConfigError(f"{_joined(at, _joined(key, _line(unknown.group(1))))}: unknown key")
    if missing := _MISSING.fullmatch(problem):
        raise ConfigError(f"{_joined(at, _joined(key, missing.group(1)))}: must be given")
    raise ConfigError(f"{_joined(at, _line(key))}: {_expected(problem)}{_found(data, key)}")


def _expected(problem: str) -> str:
    if problem.startswith("Invalid enum value"):
        return f"expected one of {', '.join(Verb)}"
    if "matching regex" in problem:
        return "expected 64 hexadecimal digits, the SHA-256 of the secret"
    if "timezone" in problem:
        return "expected a time with an offset, such as 2027-01-01T00:00:00Z"
    plain = _GOT.sub("", problem).replace("Expected", "expected").replace("`", "").replace(" | null", "")
    return plain.replace("expected object", "expected a table").replace("expected array", "expected a list")


def _found(data: Any, key: str) -> str:
    if key.startswith("keys") or not key:
        return ""
    for name, number in _STEP.findall(key):
        data = data[name] if name else data[int(number)]
    return f", found {len(data)}" if isinstance(data, list | dict) else f", found {_line(repr(data))}"


def _joined(at: str, key: str) -> str:
    return f"{at}.{key}" if at and key else at or key


def _line(text: object) -> str:
    """One printable line of bearable length."""
    line = str(text)
    if not line.isprintable():
        line = ascii(line)
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}… ({len(line)} characters)"
