"""What is beyond this process's memory: opened where something is configured, else the null object.

What speaks to other nodes, to Redis or to a disk is imported only here, and only when it is configured.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import RemoteTiers
from cachemgr.remote import NoRemoteTiers
from cachemgr.settings import CacheSettings

if TYPE_CHECKING:
    from cachemgr.cluster.moves.replicator import CopiesObserver
    from cachemgr.host_contract import HostStore
    from cachemgr.tiers.beyond import OpenedBeyond
    from cachemgr.tiers.io_thread import IoThread
    from cachemgr.tiers.sources import Sources


class Beyond(Protocol):
    """Other nodes and lower tiers as one process sees them; outlives the caches that are opened with it."""

    def tiers(self, store: "HostStore") -> RemoteTiers:
        """What a cache is opened with: `open_cache(…, remote=beyond.tiers)`."""
        ...

    def counters(self) -> Mapping[str, Mapping[str, float]]:
        """By tier ("peer", "redis", "lmdb", "" for all): totals (`…_total`) and gauges (every other name)."""
        ...

    def close(self) -> None:
        """Say goodbye, write what waits, free sockets and threads. After the caches. Idempotent."""
        ...


class NothingBeyond:
    """The null object: this process is alone with its memory."""

    def tiers(self, store: "HostStore") -> RemoteTiers:
        """Nothing is beyond this process."""
        return NoRemoteTiers()

    def counters(self) -> Mapping[str, Mapping[str, float]]:
        """Nothing to count."""
        return {}

    def close(self) -> None:
        """Nothing to close."""


def reach_beyond(cache: CacheSettings, cluster: ClusterSettings) -> Beyond:
    """Start this process's part of the cluster and its lower tiers. CacheError for settings that cannot work.

    Trouble with other nodes, a server or a disk is no reason not to start.
    """
    return open_beyond(cache, cluster) if cluster.enabled else NothingBeyond()


def open_beyond(
    cache: CacheSettings, cluster: ClusterSettings, *, copies: "CopiesObserver | None" = None
) -> "OpenedBeyond":
    """The same for who knows that something is configured. `copies`: see ClusterNode."""
    from cachemgr.cluster.node import ClusterNode
    from cachemgr.tiers.beyond import OpenedBeyond
    from cachemgr.tiers.sources import Sources

    def make(io: "IoThread") -> "Sources":
        node = ClusterNode(cache, cluster, spawn=io.spawn, copies=copies)
        return Sources(node, (), clock=time.monotonic)

    return OpenedBeyond(make)
