"""Decides on requests by an acl file: which caller a credential is, and what they may do with one model.

Invariants
- Every request is decided by one whole version of the file, and every refusal says the same to the client.
- The work for a request does not grow with the file.

Threads: any; `_take` by one at a time, the one that reads the file.
"""

import hmac
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backend.access.acl import Acl
from backend.access.acl_watch import AclWatch
from backend.access.allowances import CountedAllowances
from backend.access.audit import AuditLog
from backend.access.contract import Access, Caller, Verb
from backend.access.credential import read_credential
from backend.access.keys import digest_of
from backend.access.reason import Reason
from backend.errors import AccessDenied
from cachemgr import NamespaceShare

log = logging.getLogger(__name__)

PROBE_ID: Final = "@probe"
_PROBE_PREFIX: Final = f"{PROBE_ID}."
_PROBE: Final = Caller(PROBE_ID, PROBE_ID, frozenset({Verb.INFER}), probe_only=True)

Shares = Mapping[str, NamespaceShare]


def probe_credential(secret: bytes) -> str:
    """What the node's own liveness check sends, where an AclAccess was given the same secret."""
    return f"{_PROBE_PREFIX}{secret.hex()}"


@dataclass(frozen=True, slots=True)
class _View:
    """One version of the file, as one model sees it."""

    acl: Acl
    admitted: frozenset[str]
    """Principals that may use the model."""


class AclAccess:
    """An Authoriser by an acl file, followed while it is open."""

    def __init__(
        self,
        model: str,
        path: Path,
        *,
        probe_secret: bytes | None = None,
        beside: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """ConfigError if the file cannot be read. `now`: seconds since the epoch. `beside`: see AclWatch."""
        self._model = model
        self._probe = digest_of(probe_secret.hex()) if probe_secret else None
        self._now = now
        self._lock = threading.Lock()  # news reach every listener, in order
        self._listeners: list[Callable[[Shares], None]] = []
        self._view = _View(Acl({}, {}), frozenset())
        self.watch = AclWatch(path, self._take, beside=beside)

    def authorise(self, parameters: Mapping[str, object], *, verb: Verb) -> Caller:
        """See Authoriser."""
        view = self._view
        credential = read_credential(parameters)
        if credential.startswith(_PROBE_PREFIX):
            caller, admitted = self._prober(credential), True
        else:
            caller = view.acl.find(credential, now=self._now())
            admitted = caller.principal in view.admitted
        if not admitted or not caller.may(verb):
            reason = Reason.VERB if admitted else Reason.MODEL
            raise AccessDenied(reason, principal=caller.principal, key_id=caller.key_id)
        return caller

    def follow(self, listener: Callable[[Shares], None]) -> None:
        """See Authoriser."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._view.acl.shares)

    @property
    def principals(self) -> int:
        """How many there are, also those that may not use this model."""
        return len(self._view.acl.principals)

    def close(self) -> None:
        """See Authoriser."""
        self.watch.close()

    def _prober(self, credential: str) -> Caller:
        secret = digest_of(credential.removeprefix(_PROBE_PREFIX))
        if self._probe is None or not hmac.compare_digest(secret, self._probe):
            raise AccessDenied(Reason.WRONG_SECRET, principal=PROBE_ID)
        return _PROBE

    def _take(self, acl: Acl) -> None:
        """`acl` is in force from now on."""
        admitted = frozenset(name for name, who in acl.principals.items() if who.may_use(self._model))
        if not admitted:
            log.warning("acl: no principal may use the model %s: every request will be refused", self._model)
        with self._lock:
            before, self._view = self._view.acl.shares, _View(acl, admitted)
            if acl.shares == before:
                return
            for listener in self._listeners:
                try:
                    listener(acl.shares)
                except Exception:  # the others must hear it all the same
                    log.exception("acl: new shares of namespaces could not be told")


def open_acl_access(
    model: str,
    path: Path,
    *,
    probe_secret: bytes | None = None,
    now: Callable[[], float] = time.time,
) -> Access:
    """Access by the file at `path`, which is followed until the authoriser is closed.

    ConfigError if the file cannot be read. Nobody has room before `bound` says how much there is.
    """
    audit = AuditLog(model)
    authoriser = AclAccess(model, path, probe_secret=probe_secret, beside=audit.settle, now=now)
    authoriser.watch.start()
    return Access(authoriser, CountedAllowances(0, lambda: authoriser.principals), audit)
