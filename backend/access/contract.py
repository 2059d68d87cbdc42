"""What access control promises to the rest of the backend: who asks, what they may do, how much of it.

    credential ─▶ Authoriser.authorise ─▶ Caller ─▶ Allowances.enter … charge … leave

Identity is derived here, from a credential, and nowhere else; what a client claims about itself in other
parameters is never read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from backend.errors import AccessDenied
from cachemgr import NamespaceShare


class Verb(StrEnum):
    """What a principal may be allowed; the values are those of acl.toml."""

    INFER = "infer"
    CACHE_READ = "cache.read"
    CACHE_WRITE = "cache.write"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much a principal may ask of one model on one server; None: as much as there is."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    """Of prompt and output together."""
    concurrent: int | None = None
    """Requests that are open at once: waiting, running, or streaming."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as their credential says. `key_id` is no secret."""

    principal: str
    namespace: str
    verbs: frozenset[Verb]
    allowance: Allowance = Allowance()
    key_id: str = ""
    hides_cached_tokens: bool = False
    """Output `num_cached_tokens` is always 0 for them."""
    probe_only: bool = False
    """The node's own liveness check: anything but a probe is refused."""

    def may(self, verb: Verb) -> bool:
        """True if that is allowed."""
        return verb in self.verbs


class Authoriser(Protocol):
    """Decides on one request. Any thread; never waits."""

    def authorise(self, parameters: Mapping[str, object], *, verb: Verb) -> Caller:
        """Who asks, by the credential in `parameters` (`authorization` or `api_key`).

        Raises AccessDenied if it is missing, unknown, expired, or does not allow `verb` on this model.
        """
        ...

    def follow(self, listener: Callable[[Mapping[str, NamespaceShare]], None]) -> None:
        """Call `listener` with what each namespace may hold of the cache: now, and after every change."""
        ...

    @property
    def principals(self) -> int:
        """How many there are; 1 without access control."""
        ...

    def close(self) -> None:
        """Look at files no more. Idempotent."""
        ...


class Audit(Protocol):
    """The audit log: one line per refusal and per command, without any credential. Any thread."""

    def refused(self, request_id: str, denied: AccessDenied) -> None:
        """A request was refused."""
        ...

    def commanded(self, request_id: str, caller: Caller, command: str, outcome: str) -> None:
        """An admin said something; `outcome` is "done", what was wrong with it, or "failed", by our fault."""
        ...


class Allowances(Protocol):
    """Counts what principals use, and refuses what is beyond their allowance. Any thread; never waits."""

    def bound(self, capacity: int) -> None:
        """So many requests can be open at once, waiting or running: what principals share."""
        ...

    def enter(self, caller: Caller) -> None:
        """One more open request; every one that enters leaves, once. Raises Overloaded, naming the limit."""
        ...

    def charge(self, caller: Caller, tokens: int) -> None:
        """`tokens` of a prompt, before it is queued. Raises Overloaded, naming the limit."""
        ...

    def leave(self, caller: Caller, *, tokens: int) -> None:
        """A request that entered has ended, after `tokens` of output."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """What the door of the backend asks, together."""

    authoriser: Authoriser
    allowances: Allowances
    audit: Audit
