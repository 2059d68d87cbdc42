"""What is left of a chain is its front: after a restart, in a larger table, after failed transactions."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from cachemgr import BlockHash
from cachemgr.shard import HEADER_DTYPE
from cachemgr.tiers.lmdb_tier.database import Change
from cachemgr.tiers.lmdb_tier.errors import LmdbTrouble
from cachemgr.tiers.lmdb_tier.record import RECORD_DTYPE, keys_of
from cachemgr.tiers.lmdb_tier.rows import Row, Rows
from cachemgr.tiers.lmdb_tier.tier import LmdbTier
from tests.cachemgr.host import Host
from tests.cachemgr.node import Node, open_node
from tests.cachemgr.tiers.lmdb_tier.rig import MIB, count, opened
from tests.cachemgr.tiers.lmdb_tier.test_bound import CHAIN, kept, names_of, put
from tests.cachemgr.tiers.rig import WIDE, addresses, chain_of, eventually

FORMAT_ID = bytes(range(16))
LONG = 40


def name(chain: int, depth: int) -> BlockHash:
    return BlockHash(chain.to_bytes(8, "little") + (depth + 1).to_bytes(8, "little"))


def row(chain: int, depth: int, *, stamp: int) -> Row:
    parent = name(chain, depth - 1) if depth else b""
    return Row(name(chain, depth), depth, 4096, stamp, parent)


def gone_of(rows: Rows, count: int) -> list[BlockHash]:
    """Keys in the order in which the policy lets them go, one at a time."""
    return [rows.make_room(1, rows=0, most=1)[0].key for _ in range(count)]


def assert_fronts_last(gone: list[BlockHash]) -> None:
    depths: dict[bytes, list[int]] = {}
    for key in gone:
        depths.setdefault(key[:8], []).append(int.from_bytes(key[8:], "little"))
    assert all(of == sorted(of, reverse=True) for of in depths.values()), depths


def test_in_a_larger_table() -> None:
    rows = Rows(4 * LONG)
    for half in (range(LONG // 2), range(LONG // 2, LONG)):
        for chain in range(4):
            for depth in half:
                rows.enter(row(chain, depth, stamp=1 + half.start + chain))
    wider = rows.widen(8 * LONG)
    assert_fronts_last(gone_of(wider, 4 * LONG))


def test_after_transactions_that_came_to_nothing() -> None:
    rows = Rows(4 * LONG)
    for chain in range(4):
        for depth in range(LONG):
            rows.enter(row(chain, depth, stamp=1))
    for _ in range(5):
        rows.restore(rows.make_room(1 << 40, rows=0, most=LONG // 3))
    assert_fronts_last(gone_of(rows, 4 * LONG))


def test_of_a_chain_however_long_that_is_used_part_by_part() -> None:
    long = 20_000
    rows = Rows(long)
    for depth in range(long):
        rows.enter(row(0, depth, stamp=1))
    for _ in range(2):
        for start in range(0, long, 64):
            rows.use([name(0, depth) for depth in range(start, min(start + 64, long))])
    gone = rows.make_room(0, rows=3, most=3)
    assert [block.depth for block in gone] == [long - 1, long - 2, long - 3]


def test_of_chains_that_were_written_in_parts_and_found_again() -> None:
    key = keys_of(FORMAT_ID)
    found = np.zeros(4 * LONG, RECORD_DTYPE)
    names = [(chain, depth) for chain in range(4) for depth in range(LONG)]
    header = found["header"]
    assert header.dtype == HEADER_DTYPE
    for at, (chain, depth) in enumerate(names):
        found["stamp"][at] = 1 + (depth // 7) * 4 + chain
        header["index"][at], header["length"][at] = depth, 4096
        header["hash"][at] = np.void(name(chain, depth))
        header["parent"][at] = np.void(name(chain, depth - 1) if depth else bytes(16))
    rows, stamp = Rows.found(
        [key(name(*one)) for one in names], [record.tobytes() for record in found], bound=1 << 30
    )
    assert stamp == found["stamp"].max()
    gone = [key(one) for one in gone_of(rows, 4 * LONG)]  # the mask twice: the name
    assert_fronts_last(gone)
    assert gone[0] == name(0, LONG - 1), "the chain that was written first goes first"


def test_on_disk_after_a_restart(host: Host, folder: Path) -> None:
    """Chains that grew while others did: their fronts are older than anything else."""

    async def grow(tier: LmdbTier, node: Node, seed: int, part: slice) -> None:
        ended = count(tier, "put_blocks_total") + CHAIN // 2
        tier.put(node.store, addresses(names_of(node, seed))[part])
        await eventually(lambda: count(tier, "put_blocks_total") == ended)

    async def run() -> None:
        near, far = (open_node(host, name, blocks=64, block_format=WIDE) for name in ("near", "far"))
        for seed in range(4):
            chain_of(near, CHAIN, block_format=WIDE, seed=seed)
        async with opened(folder) as tier:
            for part in (slice(CHAIN // 2), slice(CHAIN // 2, CHAIN)):
                for seed in range(4):
                    await grow(tier, near, seed, part)
        async with opened(folder) as tier:
            for seed in range(4, 8):
                await put(tier, near, seed)
            assert count(tier, "evicted_blocks_total")
            whole = [await kept(tier, far, seed) for seed in range(8)]
            assert sum(whole) == count(tier, "entries")

    asyncio.run(run())


def test_on_disk_after_transactions_that_failed(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Change.commit
    fails = iter([True, False] * 100)

    def sometimes(change: Change) -> None:
        if next(fails):
            raise LmdbTrouble("the disk refuses")
        commit(change)

    async def run() -> None:
        near, far = (open_node(host, name, blocks=64, block_format=WIDE) for name in ("near", "far"))
        async with opened(folder, retry_s=0.001, max_bytes=40 * MIB) as tier:  # a chain is one batch
            for seed in range(16):
                await put(tier, near, seed)
            assert count(tier, "evicted_blocks_total")
            monkeypatch.setattr(Change, "commit", sometimes)
            for seed in range(16, 26):
                await put(tier, near, seed)
            monkeypatch.undo()
            assert count(tier, "put_dropped_total") == 5 * CHAIN
            whole = [await kept(tier, far, seed) for seed in range(26)]
            assert sum(whole) == count(tier, "entries")

    asyncio.run(run())
