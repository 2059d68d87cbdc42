"""The files stay within their bound whatever is written; the policy says what goes; the map grows."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from cachemgr import BlockHash
from cachemgr.eviction import AdaptivePolicy
from cachemgr.tiers.lmdb_tier.tier import LmdbTier
from tests.cachemgr.host import Host
from tests.cachemgr.node import Node, open_node
from tests.cachemgr.tiers.lmdb_tier.rig import MIB, child, count, files_nbytes, line_of, opened
from tests.cachemgr.tiers.rig import WIDE, addresses, chain_of, eventually, soon, whole_run

CHAIN = 8
"""Blocks: 2 MiB."""


def settled(tier: LmdbTier) -> int:
    """Blocks that were written, or not."""
    return sum(count(tier, f"put_{end}_total") for end in ("blocks", "dropped", "declined"))


async def put(tier: LmdbTier, node: Node, seed: int) -> None:
    """Write a chain, and let go of it."""
    ended = settled(tier) + CHAIN
    names = chain_of(node, CHAIN, block_format=WIDE, seed=seed)
    tier.put(node.store, addresses(names))
    await eventually(lambda: settled(tier) >= ended)
    node.store.drop(names)


def names_of(node: Node, seed: int) -> list[BlockHash]:
    tokens = np.arange(CHAIN * WIDE.block_tokens) + 1_000_000 * seed
    return node.cache.hashes(tokens, namespace="org")


async def kept(tier: LmdbTier, node: Node, seed: int) -> int:
    """How many leading blocks of a chain the tier has; each of them whole."""
    names = names_of(node, seed)
    await tier.get(node.store, addresses(names), deadline=soon(), arrived=bool)
    found = whole_run(node.store, names, WIDE)
    node.store.drop(names)
    return found


def test_files_stay_within_their_bound(host: Host, folder: Path) -> None:
    async def run() -> None:
        near, far = (open_node(host, name, blocks=64, block_format=WIDE) for name in ("near", "far"))
        async with opened(folder) as tier:
            for seed in range(40):
                await put(tier, near, seed)
                assert files_nbytes(folder) <= 16 * MIB
            assert count(tier, "put_blocks_total") == 40 * CHAIN
            assert count(tier, "evicted_blocks_total") >= 32 * CHAIN - 8 * 4
            assert count(tier, "entries") >= 4 * CHAIN, "a good part of the bound is blocks"
            whole = [await kept(tier, far, seed) for seed in range(40)]
            assert sum(whole) == count(tier, "entries"), "what is left of a chain is its front"

    asyncio.run(run())


def test_the_bound_holds_after_a_restart(host: Host, folder: Path) -> None:
    async def run() -> None:
        near, far = (open_node(host, name, blocks=64, block_format=WIDE) for name in ("near", "far"))
        for start in range(0, 24, 6):
            async with opened(folder) as tier:
                for seed in range(start, start + 6):
                    await put(tier, near, seed)
                assert files_nbytes(folder) <= 16 * MIB
                assert await kept(tier, far, start + 5) == CHAIN, "the newest is there"

    asyncio.run(run())


def test_what_is_used_outlives_what_is_not(host: Host, folder: Path) -> None:
    async def run() -> None:
        near, far = (open_node(host, name, blocks=64, block_format=WIDE) for name in ("near", "far"))
        async with opened(folder) as tier:
            await put(tier, near, 0)
            for seed in range(1, 12):
                await put(tier, near, seed)
                assert await kept(tier, far, 0) == CHAIN
            assert await kept(tier, far, 1) == 0

    asyncio.run(run())


def test_what_is_not_worth_what_would_go_for_it_is_declined(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        near, far = (open_node(host, name, blocks=64, block_format=WIDE) for name in ("near", "far"))
        async with opened(folder) as tier:
            for seed in range(8):
                await put(tier, near, seed)
            before = count(tier, "entries")
            monkeypatch.setattr(AdaptivePolicy, "admits", lambda policy, name, depth, parent: False)
            await put(tier, near, 8)
            assert count(tier, "put_declined_total") == CHAIN
            assert count(tier, "entries") == before
            monkeypatch.undo()
            await put(tier, near, 9)
            assert await kept(tier, far, 9) == CHAIN

    asyncio.run(run())


def test_the_map_grows_in_steps_while_it_is_read(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachemgr.tiers.lmdb_tier.shelf.FIRST_MAP_NBYTES", MIB)

    async def run() -> None:
        near, far = (open_node(host, name, blocks=64, block_format=WIDE) for name in ("near", "far"))
        async with opened(folder, max_bytes=64 * MIB, batch_bytes=MIB) as tier:
            await put(tier, near, 0)
            reading = asyncio.create_task(read_on(tier, far))
            for seed in range(1, 16):
                await put(tier, near, seed)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert count(tier, "map_growths_total") >= 5
            assert [await kept(tier, far, seed) for seed in range(16)] == [CHAIN] * 16
            assert count(tier, "corrupt_blocks_total") == count(tier, "disk_errors_total") == 0

    async def read_on(tier: LmdbTier, node: Node) -> None:
        while True:
            assert await kept(tier, node, 0) == CHAIN

    asyncio.run(run())


def test_a_reader_of_another_process_that_never_ends_costs_room_and_nothing_else(
    host: Host, folder: Path
) -> None:
    """What is freed after it began stays taken: blocks are dropped, never more than the bound is used."""

    async def run() -> None:
        near, far = (open_node(host, name, blocks=64, block_format=WIDE) for name in ("near", "far"))
        async with opened(folder) as tier:
            for seed in range(6):
                await put(tier, near, seed)
            with child("endless_reader.py", folder / "blocks") as reader:
                assert line_of(reader) == "reading"
                for seed in range(6, 20):
                    await put(tier, near, seed)
                assert count(tier, "map_full_total") >= 1
                assert count(tier, "put_dropped_total") >= 1
                assert files_nbytes(folder) <= 16 * MIB
                assert count(tier, "entries") >= 2 * CHAIN, "it does not evict for nothing"
            await eventually(lambda: tier.usable)
            before = count(tier, "put_dropped_total")
            await asyncio.sleep(0.1)  # retry_s
            for seed in range(20, 26):
                await put(tier, near, seed)
            assert count(tier, "put_dropped_total") == before, "the place of the killed reader is free again"
            assert await kept(tier, far, 25) == CHAIN
            assert count(tier, "dead_readers_total") >= 1

    asyncio.run(run())
