"""Blocks go into the folder and come back, whole, through stores, processes' ends and formats."""

import asyncio
from pathlib import Path

from tests.cachemgr.host import Host, chain, fill, read
from tests.cachemgr.node import open_node
from tests.cachemgr.tiers.lmdb_tier.rig import addresses, bring, count, keep, opened, soon


def test_blocks_come_back_into_another_store(host: Host, folder: Path) -> None:
    here, there = open_node(host, "here"), open_node(host, "there")
    hashes = chain(here.cache, 8)
    fill(here.cache, hashes)

    async def run() -> None:
        async with opened(folder) as tier:
            await keep(tier, here.store, hashes)
            assert await tier.known(there.store, addresses(hashes), deadline=soon()) == 8
            assert await bring(tier, there.store, hashes) == 8
            assert count(tier, "entries") == 8

    asyncio.run(run())
    assert read(there.cache, hashes) == 8
