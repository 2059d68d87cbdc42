"""Reads what another process keeps in a folder, perhaps as another user, and says what it found."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from tests.cachemgr.host import Host, chain
from tests.cachemgr.node import open_node
from tests.cachemgr.tiers.lmdb_tier.rig import count, opened
from tests.cachemgr.tiers.rig import addresses, chain_of, soon, whole_run

BLOCKS = 20


async def main(folder: Path, memory: Path) -> None:
    host = Host(memory)
    node = open_node(host, "reader")
    names = chain(node.cache, BLOCKS)
    async with opened(folder) as tier:
        print("usable", flush=True)
        assert await tier.known(node.store, addresses(names), deadline=soon()) == BLOCKS
        await tier.get(node.store, addresses(names), deadline=soon(), arrived=bool)
        print("brought", whole_run(node.store, names), flush=True)
        tier.put(node.store, addresses(chain_of(node, 1, seed=1)))
        print("not writer", count(tier, "put_not_writer_total"), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    host.close()


if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))  # only now: its interpreter may lie where only root can read
with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
    asyncio.run(main(Path(sys.argv[1]), Path(memory)))
