"""The tiers that every behaviour test runs on; a new one is added here and nowhere else."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cachemgr import BlockHash, HostCache, Lease, PrefixCache
from cachemgr.host_contract import HostStore
from tests.cachemgr.copier import Copier, copy_shards, store_of
from tests.cachemgr.host import Host

OpenTier = Callable[..., PrefixCache]


def open_host_tier(host: Host) -> OpenTier:
    return host.open


class TravelledTier:
    """A cache whose every acquired block has just been to another node, and was fetched back from there."""

    def __init__(self, host: Host, *, blocks: int = 64, node: str = "near", **others: object) -> None:
        far: list[HostStore] = []
        host.open(blocks=4 * blocks, node=f"far-from-{node}", remote=store_of(far), **others)
        self._clock = host.clock
        self._far = far[0]
        self._cache: HostCache = host.open(blocks=blocks, node=node, remote=self._connect, **others)

    def acquire(
        self, hashes: Sequence[BlockHash], *, deadline: float | None, block_s: float | None = None
    ) -> Lease:
        run = hashes[: self._cache.lookup(hashes)]
        copy_shards(self._near, self._far, run)
        there = set(run) - {run[index] for index in self._far.missing(run)}
        self._near.drop([name for name in run if name in there])
        lease = self._cache.acquire(hashes, deadline=self._clock() + 60.0)
        if not lease.ready:
            self._copier.settle()
        assert lease.ready
        return lease

    def counters(self) -> dict[str, float]:
        """What a lease fetched counts as hit, as it would have been without the journey."""
        counts = self._cache.counters()
        counts["cache_hit_blocks_total"] += counts["cache_fetched_blocks_total"]
        return counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def _connect(self, store: HostStore) -> Copier:
        self._near = store
        self._copier = Copier(store, self._far)
        return self._copier


def open_travelled_tier(host: Host) -> OpenTier:
    def opened(**options: Any) -> PrefixCache:
        tier: Any = TravelledTier(host, **options)
        return tier  # type: ignore[no-any-return]

    return opened


TIERS = [pytest.param(open_host_tier, id="host"), pytest.param(open_travelled_tier, id="travelled")]
