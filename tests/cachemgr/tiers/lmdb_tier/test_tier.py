"""Blocks survive the process, in batches, through restarts; what was used stays longest."""

import asyncio
import subprocess
import sys
from pathlib import Path

import lmdb

from cachemgr import BlockFormat
from tests.cachemgr.host import Host
from tests.cachemgr.node import open_node
from tests.cachemgr.tiers.lmdb_tier.rig import count, opened
from tests.cachemgr.tiers.rig import WIDE, Pair, addresses, chain_of, eventually, soon, whole_run

BLOCKS = 20
LONG = BlockFormat(
    kv_identity=b"identity of test", dtype="float32", layers=9, kv_heads=5, head_dim=200, block_tokens=32
)
"""2.2 MiB, which is no multiple of anything: three pieces of LMDB."""


def test_blocks_are_there_after_a_restart(host: Host, folder: Path) -> None:
    pair = Pair(host)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
        async with opened(folder) as tier:
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == BLOCKS
            assert await pair.fetch(tier) == BLOCKS
            assert count(tier, "put_blocks_total") == 0

    asyncio.run(run())


def test_a_block_of_several_pieces(host: Host, folder: Path) -> None:
    pair = Pair(host, blocks=3, block_format=LONG)

    async def run() -> None:
        async with opened(folder, max_bytes=256 << 20) as tier:
            await pair.keep(tier)
            assert await pair.fetch(tier) == 3

    asyncio.run(run())


def test_what_waits_is_written_in_one_transaction(host: Host, folder: Path) -> None:
    pair = Pair(host)

    async def run() -> None:
        async with opened(folder, batch_s=0.3) as tier:
            for block in pair.blocks:
                tier.put(pair.near.store, [block])
            await eventually(lambda: count(tier, "put_blocks_total") == BLOCKS)
            assert count(tier, "batches_total") == 1

    asyncio.run(run())


def test_a_full_batch_does_not_wait_for_its_time(host: Host, folder: Path) -> None:
    pair = Pair(host)

    async def run() -> None:
        async with opened(folder, batch_s=3600.0, batch_writes=5) as tier:
            tier.put(pair.near.store, pair.blocks)
            await eventually(lambda: count(tier, "put_blocks_total") == BLOCKS)
            assert count(tier, "batches_total") == BLOCKS // 5

    asyncio.run(run())


def test_a_batch_is_bounded_in_bytes(host: Host, folder: Path) -> None:
    pair = Pair(host, block_format=WIDE)

    async def run() -> None:
        async with opened(folder, max_bytes=64 << 20, batch_bytes=1 << 20, batch_s=3600.0) as tier:
            tier.put(pair.near.store, pair.blocks)
            await eventually(lambda: count(tier, "put_blocks_total") == BLOCKS)
            assert count(tier, "batches_total") == BLOCKS // 4

    asyncio.run(run())


def test_formats_share_a_folder_and_an_engine_rolled_back_finds_its_blocks(host: Host, folder: Path) -> None:
    pair = Pair(host)
    wide = open_node(host, "wide", block_format=WIDE)
    names = chain_of(wide, 4, block_format=WIDE)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
        async with opened(folder) as tier:
            tier.put(wide.store, addresses(names))
            await eventually(lambda: count(tier, "put_blocks_total") == 4)
        async with opened(folder) as tier:
            assert await pair.fetch(tier) == BLOCKS
            again = open_node(host, "again", block_format=WIDE)
            await tier.get(again.store, addresses(names), deadline=soon(), arrived=bool)
            assert whole_run(again.store, names, WIDE) == 4

    asyncio.run(run())


def test_a_start_reads_records_and_no_payload(host: Host, folder: Path) -> None:
    """With every payload gone from the file, all is known as before; only bringing finds out."""
    pair = Pair(host)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
        with lmdb.open(str(folder / "blocks"), map_size=64 << 20, max_dbs=2) as env:
            pieces = env.open_db(b"pieces")
            with env.begin(write=True) as txn:
                txn.drop(pieces, delete=False)
        async with opened(folder) as tier:
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == BLOCKS
            assert await pair.fetch(tier) == 0
            assert count(tier, "corrupt_blocks_total") == 1

    asyncio.run(run())


def test_nothing_of_it_is_imported_with_the_settings() -> None:
    code = "import sys, cachemgr.tiers.lmdb_tier; print('lmdb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"
