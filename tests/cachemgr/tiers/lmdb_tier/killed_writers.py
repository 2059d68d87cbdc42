"""Starts a writer for each line it is told, and says which process it is: forked, which costs little.

Forked before anything is opened: LMDB is opened by each process for itself.
"""

import asyncio
import os
import sys
import threading
from pathlib import Path

from tests.cachemgr.host import Host
from tests.cachemgr.node import open_node
from tests.cachemgr.tiers.lmdb_tier.rig import count, opened
from tests.cachemgr.tiers.rig import WIDE, addresses, chain_of, eventually

BLOCKS = 6


async def write_on(folder: Path, memory: Path, first: int) -> None:
    """Chain after chain, until it is killed."""
    node = open_node(Host(memory), f"writer-{os.getpid()}", blocks=16, block_format=WIDE)
    async with opened(folder, batch_bytes=1 << 20, batch_s=0.001) as tier:
        if first % 2:
            print("opened", flush=True)
        for seed in range(first, first + 100_000):
            names = chain_of(node, BLOCKS, block_format=WIDE, seed=seed % 40)
            tier.put(node.store, addresses(names))
            await eventually(lambda: not tier.counters()["queue_blocks"])
            if seed == first and not first % 2:
                await eventually(lambda: count(tier, "batches_total") or count(tier, "put_known_total"))
                print("opened", flush=True)
            node.store.drop(names)


def serve(folder: Path, memory: Path) -> None:
    for number, line in enumerate(sys.stdin):
        assert line.strip() == "start"
        assert threading.active_count() == 1
        pid = os.fork()
        if not pid:
            try:
                asyncio.run(write_on(folder, memory, number))
            finally:
                os._exit(1)  # it is killed: this is not reached
        print(pid, flush=True)
        os.waitpid(pid, 0)
        for left in memory.iterdir():
            left.unlink()
        print("ended", flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
