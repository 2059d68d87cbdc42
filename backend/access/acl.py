"""What an acl file says: who there is, and whose key is whose. Immutable: a request sees one whole file."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from backend.access.contract import Allowance, Caller, Verb
from backend.access.keys import Compare, KeyEntry, is_secret_of, split_credential
from backend.access.reason import Reason
from backend.errors import AccessDenied, ConfigError
from cachemgr import NamespaceShare


@dataclass(frozen=True, slots=True)
class Principal:
    """One of [principals]. `models` are globs; case counts."""

    name: str
    namespace: str
    models: tuple[str, ...]
    verbs: frozenset[Verb]
    allowance: Allowance = field(default_factory=Allowance)
    hides_cached_tokens: bool = False
    keys: tuple[KeyEntry, ...] = ()

    def may_use(self, model: str) -> bool:
        """True if one of the globs matches."""
        return any(fnmatchcase(model, glob) for glob in self.models)


class Acl:
    """What one acl file says."""

    __slots__ = ("_callers", "_keys", "principals", "shares")

    def __init__(self, principals: Mapping[str, Principal], shares: Mapping[str, NamespaceShare]) -> None:
        """`shares`: of every namespace that somebody writes to. ConfigError for an id of two keys."""
        self.principals = MappingProxyType(dict(principals))
        self.shares = MappingProxyType(dict(shares))
        self._keys: dict[str, KeyEntry] = {}
        self._callers: dict[str, Caller] = {}
        for principal in self.principals.values():
            for number, key in enumerate(principal.keys):
                if key.id in self._keys:
                    owner = self._callers[key.id].principal
                    raise ConfigError(
                        f"principals.{principal.name}.keys[{number}].id: must be unique in the file, "
                        f"{key.id} is one of principals.{owner} already"
                    )
                self._keys[key.id] = key
                self._callers[key.id] = _caller(principal, key)

    def find(self, credential: str, *, now: float, compare: Compare = hmac.compare_digest) -> Caller:
        """Whose it is. `now`: seconds since the epoch. AccessDenied if nobody's, or expired.

        An unknown id and a wrong secret cost the same.
        """
        key_id, secret = split_credential(credential)
        key, caller = self._keys.get(key_id), self._callers.get(key_id)
        right = is_secret_of(key, secret, compare=compare)
        if key is None or caller is None:
            raise AccessDenied(Reason.UNKNOWN_KEY)
        if not right:
            raise AccessDenied(Reason.WRONG_SECRET, principal=caller.principal, key_id=key_id)
        if key.expired(now):
            raise AccessDenied(Reason.EXPIRED, principal=caller.principal, key_id=key_id)
        return caller


def _caller(principal: Principal, key: KeyEntry) -> Caller:
    return Caller(
        principal.name,
        principal.namespace,
        principal.verbs,
        allowance=principal.allowance,
        key_id=key.id,
        hides_cached_tokens=principal.hides_cached_tokens,
    )
