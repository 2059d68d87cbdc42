"""Questions to control services of a cluster: where to ask, as which cluster, and what went wrong.

Only nodes on this host are asked in the clear; all others with the certificates of a tensorcache.toml.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cachemgr.cluster.control.grpc_service import ask
from cachemgr.cluster.control.messages import (
    RING,
    STATUS,
    Method,
    Replaces,
    Reply,
    Request,
    RingReply,
    RingRequest,
    StatusReply,
    StatusRequest,
)
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.cluster.settings import ClusterSettings, is_loopback, split_address
from cachemgr.errors import SettingsError
from cachemgr.ring import RingState, Version, decode_ring, encode_ring
from scripts.errors import CommandError, UsageError
from scripts.ring.options import DEFAULT_CONFIG

Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Reply)

_OWN_CLUSTER = "local"
_CHANGE_S = 10.0
"""A change waits for the other nodes, or for Redis, within deadlines of its own."""


class NodeError(CommandError):
    """A node that was asked did not answer, or refused.

    `problem` is what is wrong, `kind` its kind; the text says beside that what to do.
    """

    def __init__(self, problem: str, kind: Trouble, *, advice: str = "") -> None:
        super().__init__(f"{problem}: {advice}" if advice else problem)
        self.problem = problem
        self.kind = kind


@dataclass(frozen=True)
class Entry:
    """The node that is asked first, and how."""

    address: str
    cluster: str
    timeout_s: float
    settings: ClusterSettings = field(default_factory=ClusterSettings)

    def ask(
        self,
        method: Method[Q, R],
        request: Q,
        *,
        address: str = "",
        timeout_s: float | None = None,
    ) -> R:
        """The reply of the node at `address`, this one by default; NodeError in trouble."""
        where, within_s = address or self.address, timeout_s or self.timeout_s
        self.check(where)
        request.cluster = self.cluster
        try:
            return ask(where, method, request, timeout_s=within_s, settings=self.settings)
        except ControlTrouble as trouble:
            problem, advice = _told(trouble, where, entry=self, within_s=within_s)
            raise NodeError(problem, trouble.kind, advice=advice) from None

    def check(self, address: str) -> None:
        """UsageError where asking would need certificates that we do not have."""
        if not self.settings.tls_cert and not is_loopback(address):
            raise UsageError(
                f"{address} is not on this host, and without certificates only nodes on this host are asked: "
                "name a tensorcache.toml that has tls_cert, tls_key and tls_ca with --config"
            )

    def status(self, address: str = "", *, timeout_s: float | None = None) -> StatusReply:
        """What a node says of itself."""
        return self.ask(STATUS, StatusRequest(), address=address, timeout_s=timeout_s)

    def ring(self) -> RingState:
        """The ring in force there."""
        reply = self.ask(RING, RingRequest())
        if not reply.state:
            problem = f"the node at {self.address} has no ring yet"
            raise NodeError(problem, Trouble.FAILED, advice="ask again in a moment")
        return decode_ring(reply.state)

    def propose(self, state: RingState, *, replaces: Version) -> RingReply:
        """Make `state` the cluster's ring in place of the one of that version."""
        version = state.version
        request = RingRequest(
            state=encode_ring(state),
            replaces=Replaces(*replaces),
            epoch=version.epoch,
            digest=version.digest,
        )
        return self.ask(RING, request, timeout_s=max(self.timeout_s, _CHANGE_S))


def entry_from(arguments: argparse.Namespace) -> Entry:
    """What `add_entry` parsed; UsageError if that names no node."""
    config: Path = arguments.config or DEFAULT_CONFIG
    settings, cluster = ClusterSettings(), _OWN_CLUSTER
    if arguments.config is not None or config.exists():
        from backend.settings import read_node_settings

        node = read_node_settings(config)
        settings, cluster = node.cluster, node.cache.cluster
    address = arguments.at or settings.address
    if not address:
        there = f"{config} has no [cluster] listen" if config.exists() else f"{config} is not there"
        raise UsageError(f"{there}: name a node with --at HOST:PORT, or its tensorcache.toml with --config")
    try:
        split_address(address, field="--at")
    except SettingsError as error:
        raise UsageError(str(error)) from None
    entry = Entry(address, arguments.cluster or cluster, arguments.timeout, settings)
    entry.check(address)
    return entry


def _told(trouble: ControlTrouble, address: str, *, entry: Entry, within_s: float) -> tuple[str, str]:
    """What is wrong, and what to do."""
    cluster, certificate = entry.cluster, entry.settings.tls_cert
    text = str(trouble).partition(": ")[2] or str(trouble)  # without the method's name
    text = text.removeprefix(f"{trouble.kind.value}: ")
    match trouble.kind:
        case Trouble.REFUSED:
            return f"no node listens at {address}", "start it, or name another one with --at"
        case Trouble.DEADLINE:
            problem = f"the node at {address} does not answer within {within_s:g} s"
            return problem, "try another one with --at, or a longer --timeout"
        case Trouble.CLUSTER:
            return f"the node at {address} is not of cluster {cluster!r}", "name its cluster with --cluster"
        case Trouble.LOST:
            problem = f"the node at {address} cannot be asked ({text})"
            if certificate:
                host = split_address(address, field="--at")[0]
                advice = (
                    f"is that a control service? Compare `tensorcache cert show {certificate}` with the "
                    f"node's: both of one CA, neither ended, that one made with --host {host}"
                )
                return problem, advice
            return problem, "is that a control service? For TLS, name the node's tensorcache.toml: --config"
        case Trouble.WIRE | Trouble.UNKNOWN:
            return f"the node at {address} is of another release ({text})", "use that one's `tensorcache`"
        case Trouble.INVALID | Trouble.FAILED:
            return text, ""
    return f"the node at {address} cannot be asked: {text}", "try another one with --at"
