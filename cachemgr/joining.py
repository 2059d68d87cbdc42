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
from cachemgr.tiers.lmdb_tier.settings import LmdbTierSettings
from cachemgr.tiers.redis_tier.settings import RedisTierSettings

if TYPE_CHECKING:
    from cachemgr.cluster.moves.replicator import CopiesObserver
    from cachemgr.host_contract import HostStore
    from cachemgr.tiers.beyond import OpenedBeyond
    from cachemgr.tiers.contract import LowerTier
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

    def hot(self) -> Mapping[str, float]:
        """Segments of this node that others read most, in hex, and their reads per second. For admins only:
        who knows a name of a block knows that somebody asked for its prompt.
        """
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

    def hot(self) -> Mapping[str, float]:
        """Nobody reads here."""
        return {}

    def close(self) -> None:
        """Nothing to close."""


def reach_beyond(
    cache: CacheSettings,
    cluster: ClusterSettings,
    *,
    redis: RedisTierSettings,
    lmdb: LmdbTierSettings,
) -> Beyond:
    """Start this process's part of the cluster and its lower tiers. CacheError for settings that cannot work.

    Trouble with other nodes, a server or a disk is no reason not to start.
    """
    if not (cluster.enabled or redis.enabled or lmdb.enabled):
        return NothingBeyond()
    return open_beyond(cache, cluster, redis=redis, lmdb=lmdb)


def open_beyond(
    cache: CacheSettings,
    cluster: ClusterSettings | None = None,
    *,
    redis: RedisTierSettings | None = None,
    lmdb: LmdbTierSettings | None = None,
    copies: "CopiesObserver | None" = None,
) -> "OpenedBeyond":
    """The same for who knows that something is configured. `copies`: see ClusterNode."""
    from cachemgr.tiers.beyond import OpenedBeyond
    from cachemgr.tiers.sources import Sources

    def make(io: "IoThread") -> "Sources":
        node = None
        if cluster is not None and cluster.enabled:
            from cachemgr.cluster.node import ClusterNode

            node = ClusterNode(cache, cluster, spawn=io.spawn, copies=copies)
        return Sources(node, _lower_tiers(cache, redis, lmdb), clock=time.monotonic)

    return OpenedBeyond(make)


def _lower_tiers(
    cache: CacheSettings, redis: RedisTierSettings | None, lmdb: LmdbTierSettings | None
) -> "list[LowerTier]":
    """In the order in which blocks go down."""
    tiers: list[LowerTier] = []
    if redis is not None and redis.enabled:
        from cachemgr.tiers.redis_tier import open_redis_tier

        tiers.append(open_redis_tier(redis, cluster=cache.cluster))
    if lmdb is not None and lmdb.enabled:
        from cachemgr.tiers.lmdb_tier import open_lmdb_tier

        tiers.append(open_lmdb_tier(lmdb))
    return tiers
