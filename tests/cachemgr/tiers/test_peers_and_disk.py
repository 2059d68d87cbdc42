"""The real fetcher, a real disk and real host tiers together: what one lacks the other gives."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from cachemgr import BlockHash, LmdbTierSettings
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.fetching import PEER, TieredFetch
from cachemgr.tiers.lmdb_tier import open_lmdb_tier
from tests.cachemgr.cluster.fetch.nodes import Cluster, cluster
from tests.cachemgr.host import FORMAT
from tests.cachemgr.tiers.rig import addresses, eventually, soon, whole_run

BLOCKS = 64


def with_disk(
    path: Path, c: Cluster, hashes: Sequence[BlockHash], work: Callable[[LowerTier], Awaitable[None]]
) -> None:
    """Run `work` with a disk that has the whole prompt, which n0 has not any more."""
    c.place(hashes, range(BLOCKS), "n0")
    store = c.me.store

    async def whole() -> None:
        tier = open_lmdb_tier(LmdbTierSettings(path=str(path), batch_s=0.02))
        await tier.start()
        try:
            tier.put(store, addresses(hashes))
            await eventually(lambda: tier.counters()["put_blocks_total"] >= BLOCKS)
            store.drop(hashes)
            await work(tier)
        finally:
            await tier.close()
            await c.fetcher.close()

    asyncio.run(whole())


@pytest.mark.parametrize("block_s", [None, 10.0])
def test_the_disk_has_what_peers_lack(tmp_path: Path, block_s: float | None) -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(BLOCKS, where=lambda owners: all("n0" not in both for both in owners))
        c.place_all(hashes, but=range(40, BLOCKS))

        async def work(tier: LowerTier) -> None:
            fetching = TieredFetch(c.fetcher, [tier], clock=time.monotonic, came=lambda *came: None)
            await fetching.fetch(c.me.store, hashes, deadline=soon(), block_s=block_s)
            assert whole_run(c.me.store, hashes, FORMAT) == BLOCKS
            await eventually(lambda: fetching.idle)
            assert fetching.counters()[PEER]["tier_fetched_blocks_total"] == 40
            assert fetching.counters()["lmdb"]["tier_fetched_blocks_total"] == BLOCKS - 40
            await c.settle()

        with_disk(tmp_path, c, hashes, work)


def test_the_disk_has_what_silent_peers_do_not_give(tmp_path: Path) -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(BLOCKS, where=lambda owners: all("n0" not in both for both in owners))

        async def work(tier: LowerTier) -> None:
            for peer in c.peers.values():
                peer.silent = peer.deaf = True
            fetching = TieredFetch(c.fetcher, [tier], clock=time.monotonic, came=lambda *came: None)
            await fetching.fetch(c.me.store, hashes, deadline=soon(), block_s=0.5)
            assert whole_run(c.me.store, hashes, FORMAT) == BLOCKS
            await eventually(lambda: fetching.idle)

        with_disk(tmp_path, c, hashes, work)
