"""Several processes and one folder: one writes, others read and take over; a kill harms nothing."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from cachemgr import BlockHash
from cachemgr.tiers.lmdb_tier.tier import LmdbTier
from tests.cachemgr.host import Host
from tests.cachemgr.node import Node, open_node
from tests.cachemgr.tiers.lmdb_tier.killed_writers import BLOCKS
from tests.cachemgr.tiers.lmdb_tier.rig import child, count, end, files_nbytes, line_of, opened, settings_of
from tests.cachemgr.tiers.rig import WIDE, Pair, addresses, chain_of, eventually, soon, whole_run

KILLS = 100


@pytest.mark.timeout(120)
def test_a_hundred_kills_in_the_middle_of_a_batch(host: Host, folder: Path, shared_memory: Path) -> None:
    """Soon after it was opened, or after its first transaction. Each time the store opens, all is whole."""
    chance = random.Random(5)
    memory = shared_memory / "writers"
    memory.mkdir()
    found = 0

    async def look(node: Node, names: list[list[BlockHash]]) -> int:
        async with opened(folder) as tier:
            assert count(tier, "begun_anew_total") == 0
            whole = 0
            for chain in chance.sample(names, 8):
                await tier.get(node.store, addresses(chain), deadline=soon(), arrived=bool)
                whole += whole_run(node.store, chain, WIDE)
                node.store.drop(chain)
            assert count(tier, "corrupt_blocks_total") == 0
            return whole

    node = open_node(host, "node", blocks=40 * BLOCKS + 8, block_format=WIDE)
    names = [chain_of(node, BLOCKS, block_format=WIDE, seed=seed) for seed in range(40)]
    for chain in names:
        node.store.drop(chain)
    with child("killed_writers.py", folder, memory) as writers:
        assert writers.stdin is not None
        for _ in range(KILLS):
            writers.stdin.write("start\n")
            pid, opened_line = line_of(writers), line_of(writers)
            if pid == "opened":
                pid, opened_line = opened_line, pid
            assert opened_line == "opened"
            time.sleep(chance.uniform(0.0, 0.04))  # anywhere in a batch
            os.kill(int(pid), signal.SIGKILL)
            assert line_of(writers) == "ended"
            found += asyncio.run(look(node, names))
            assert files_nbytes(folder) <= 16 << 20
    assert found > KILLS, "there was something to find"


def test_another_process_reads_what_is_written(host: Host, folder: Path) -> None:
    pair = Pair(host)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
            with child("reading_process.py", folder) as reader:
                assert line_of(reader) == "usable"
                assert line_of(reader) == "brought 20"
                assert line_of(reader) == "not writer 1"
                end(reader)

    asyncio.run(run())


def test_who_reads_takes_over_when_the_writer_is_killed(
    host: Host, folder: Path, shared_memory: Path
) -> None:
    memory = shared_memory / "writers"
    memory.mkdir()
    pair = Pair(host)

    async def run() -> None:
        with child("killed_writers.py", folder, memory) as writers:
            assert writers.stdin is not None
            writers.stdin.write("start\n")
            pid = next(line for line in (line_of(writers), line_of(writers)) if line != "opened")
            async with opened(folder) as tier:
                assert not count(tier, "writer")
                tier.put(pair.near.store, pair.blocks)
                assert count(tier, "put_not_writer_total") == 20
                os.kill(int(pid), signal.SIGKILL)
                assert line_of(writers) == "ended"
                await eventually(lambda: count(tier, "writer"))
                await pair.keep(tier)
                assert await pair.fetch(tier) == 20

    asyncio.run(run())


def test_one_process_never_opens_a_folder_twice(host: Host, folder: Path) -> None:
    """The second tier waits for the first to close; neither harms the other."""
    pair = Pair(host)

    async def run() -> None:
        second = LmdbTier(settings_of(folder))
        async with opened(folder) as first:
            await pair.keep(first)
            await second.start()
            await eventually(lambda: count(second, "disk_errors_total"))
            assert not second.usable
            assert await pair.fetch(first) == 20
        await eventually(lambda: count(second, "writer"))
        assert await second.known(pair.far.store, pair.blocks, deadline=soon()) == 20
        await second.close()

    asyncio.run(run())
