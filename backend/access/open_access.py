"""No access control: everybody may infer, in one shared namespace."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from backend.access.audit import AuditLog
from backend.access.contract import Access, Caller, Verb
from backend.access.reason import Reason
from backend.errors import AccessDenied
from cachemgr import NamespaceShare

log = logging.getLogger(__name__)

DEFAULT_NAMESPACE: Final = "default"
NOBODY: Final = Caller("", "", frozenset())
EVERYBODY: Final = Caller("", DEFAULT_NAMESPACE, frozenset(Verb) - {Verb.ADMIN})


class OpenAccess:
    """An Authoriser that lets everybody in, into one shared namespace; says so once."""

    principals = 1

    def __init__(self) -> None:
        log.warning(
            "access control is off: callers share the namespace %r and can tell by timing what others asked",
            DEFAULT_NAMESPACE,
        )

    def authorise(self, parameters: Mapping[str, object], *, verb: Verb) -> Caller:
        """Everybody, but nobody administers."""
        if not EVERYBODY.may(verb):
            raise AccessDenied(Reason.ACCESS_OFF)
        return EVERYBODY

    def follow(self, listener: Callable[[Mapping[str, NamespaceShare]], None]) -> None:
        """One namespace shares with nobody."""

    def close(self) -> None:
        """Nothing to close."""


class NoLimits:
    """Allowances without bounds: where nobody is told from anybody else, only the queue is bounded."""

    def bound(self, capacity: int) -> None:
        """The queue keeps it."""

    def enter(self, caller: Caller) -> None:
        """Always."""

    def charge(self, caller: Caller, tokens: int) -> None:
        """Nothing is counted."""

    def leave(self, caller: Caller, *, tokens: int) -> None:
        """Nothing is counted."""


def open_access(model: str) -> Access:
    """Everybody, without limits."""
    return Access(OpenAccess(), NoLimits(), AuditLog(model))
