"""Whether this process is part of a cluster: opens its node, or the null object where none is configured.

What speaks to other nodes is imported only here, and only when a cluster is configured.
"""

from typing import TYPE_CHECKING, Protocol

from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import RemoteTiers
from cachemgr.remote import NoRemoteTiers
from cachemgr.settings import CacheSettings

if TYPE_CHECKING:
    from cachemgr.cluster.contract import HostStore


class Cluster(Protocol):
    """The cluster as one process sees it; outlives the caches that are opened with it."""

    def tiers(self, store: "HostStore") -> RemoteTiers:
        """What a cache is opened with: `open_cache(…, remote=cluster.tiers)`."""
        ...

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`) and gauges (every other name)."""
        ...

    def close(self) -> None:
        """Say goodbye to the other nodes, free sockets and threads. After the caches. Idempotent."""
        ...


class NoCluster:
    """The null object: this node is alone."""

    def tiers(self, store: "HostStore") -> RemoteTiers:
        """Nothing is beyond this process."""
        return NoRemoteTiers()

    def counters(self) -> dict[str, float]:
        """Nothing to count."""
        return {}

    def close(self) -> None:
        """Nothing to close."""


def join_cluster(cache: CacheSettings, cluster: ClusterSettings) -> Cluster:
    """Start this process's part of the cluster. CacheError for settings that cannot work here.

    Trouble with other nodes is no reason not to start.
    """
    if not cluster.enabled:
        return NoCluster()
    from cachemgr.cluster.node import open_node

    return open_node(cache, cluster)
