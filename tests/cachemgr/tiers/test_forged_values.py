"""Forged shards in Redis and LMDB: a miss each, removed unless another process may read it; never a crash."""

import asyncio
from pathlib import Path

import lmdb
import pytest

from cachemgr.shard import HEADER_NBYTES, BlockAddress, Verdict
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.lmdb_tier.record import STAMP_NBYTES, keys_of, piece_key
from tests.cachemgr.forgeries import Forgery, cuts, forgeries
from tests.cachemgr.host import FORMAT, SECRETS, Host
from tests.cachemgr.tiers.lower_tiers import open_lmdb
from tests.cachemgr.tiers.redis_tier.rig import key_of, tier_at, value_of
from tests.cachemgr.tiers.rig import Pair, eventually, soon
from tests.redis_server import RedisServer

TROUBLES = ("troubles_total", "failed_calls_total", "disk_errors_total")
ALL = forgeries(FORMAT, tags=SECRETS.tags)
SHARD_NBYTES = HEADER_NBYTES + FORMAT.payload_nbytes
Spoiled = list[tuple[str, Verdict, BlockAddress, bytes]]


def spoil(pair: Pair) -> Spoiled:
    """Every second block of the prompt, forged or cut: name, what it is, its address, and the bytes."""
    cut = [
        Forgery(f"cut to {length}", Verdict.CORRUPT, lambda shard, _, length=length: shard[:length])  # type: ignore[misc]
        for length in cuts(FORMAT.payload_nbytes)
    ]
    spoiled = []
    for at, forgery in enumerate([*ALL, *cut]):
        shard, neighbour = value_of(pair, 2 * at), value_of(pair, 2 * at + 1)
        forged = forgery.forge(shard, neighbour)
        if forged != shard:
            spoiled.append((forgery.name, forgery.verdict, pair.blocks[2 * at], forged))
    assert len(spoiled) > 150
    return spoiled


def pair_for_all(host: Host) -> Pair:
    return Pair(host, blocks=2 * (len(ALL) + len(cuts(FORMAT.payload_nbytes))))


async def find_each(tier: LowerTier, pair: Pair, spoiled: Spoiled) -> None:
    for name, verdict, block, _ in spoiled:
        before = tier.counters()
        await tier.get(pair.far.store, [block], deadline=soon(), arrived=pair.arrived.append)
        after = tier.counters()
        for one in (Verdict.CORRUPT, Verdict.UNREADABLE):
            counter = f"{one.value}_blocks_total"
            assert after[counter] - before[counter] == (one is verdict), name
        assert pair.far.store.missing([block.hash]) == [0], name
    assert pair.arrived == []
    corrupt = sum(verdict is Verdict.CORRUPT for _, verdict, _, _ in spoiled)
    await eventually(lambda: tier.counters()["removed_blocks_total"] == corrupt)
    counts = tier.counters()
    assert [counts.get(name, 0) for name in TROUBLES] == [0] * len(TROUBLES)
    rest = [block for block in pair.blocks if block not in {block for _, _, block, _ in spoiled}]
    for block in rest:
        await tier.get(pair.far.store, [block], deadline=soon(), arrived=pair.arrived.append)
    assert len(pair.arrived) == len(rest), "the neighbours are as good as before"
    assert tier.usable
    pair.whole()


def test_a_redis_that_somebody_wrote_into(host: Host, tmp_path: Path) -> None:
    async def run() -> None:
        pair = pair_for_all(host)
        with RedisServer(tmp_path) as server:
            async with tier_at(server.url, connections=1, call_s=5.0) as tier:
                await pair.keep(tier)
                spoiled = spoil(pair)
                for _, _, block, forged in spoiled:
                    server.command("SET", key_of(pair, block), forged)
                await find_each(tier, pair, spoiled)
                for name, verdict, block, forged in spoiled:
                    there = server.command("EXISTS", key_of(pair, block)) == b":1"
                    assert there == (verdict is Verdict.UNREADABLE), name
                    if there:
                        assert server.command("GET", key_of(pair, block)) == forged

    asyncio.run(run())


def test_an_lmdb_that_somebody_wrote_into(host: Host, tmp_path: Path) -> None:
    """Records keep their size: of another one, the store is begun anew."""

    async def run() -> None:
        pair = pair_for_all(host)
        async with open_lmdb(tmp_path) as tier:
            await pair.keep(tier)
        spoiled = [one for one in spoil(pair) if len(one[3]) >= HEADER_NBYTES]
        key = keys_of(pair.near.store.format_id)

        def write() -> None:
            with lmdb.open(str(tmp_path / "lmdb" / "blocks"), map_size=64 << 20, max_dbs=2) as env:
                blocks, pieces = env.open_db(b"blocks"), env.open_db(b"pieces")
                with env.begin(write=True) as txn:
                    for _, _, block, forged in spoiled:
                        name = key(block.hash)
                        stamp = txn.get(name, db=blocks)[:STAMP_NBYTES]
                        txn.put(name, stamp + forged[:HEADER_NBYTES], db=blocks)
                        txn.put(piece_key(name, 0), forged[HEADER_NBYTES:], db=pieces)

        await asyncio.to_thread(write)
        async with open_lmdb(tmp_path) as tier:
            await find_each(tier, pair, spoiled)
            await pair.keep(tier)
            assert await tier.known(pair.near.store, pair.blocks, deadline=soon()) == len(pair.blocks)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("stamp", "index"), [(0, 0), (1, 2**31), (2**63 - 1, 2**32 - 1), (2**63, 0), (2**64 - 1, 2**32 - 1)]
)
def test_an_lmdb_whose_records_say_anything_starts_and_works(
    host: Host, tmp_path: Path, stamp: int, index: int
) -> None:
    """Lengths, depths and stamps are read at the start, before any tag is checked."""

    async def run() -> None:
        pair = Pair(host, blocks=12)
        async with open_lmdb(tmp_path) as tier:
            await pair.keep(tier)
        key = keys_of(pair.near.store.format_id)

        def write() -> None:
            with lmdb.open(str(tmp_path / "lmdb" / "blocks"), map_size=64 << 20, max_dbs=2) as env:
                blocks = env.open_db(b"blocks")
                with env.begin(write=True) as txn:
                    for block, length in zip(pair.blocks[2:], (0, 1, 2**31, 2**32 - 1), strict=False):
                        header = bytearray(txn.get(key(block.hash), db=blocks)[STAMP_NBYTES:])
                        header[0:4] = length.to_bytes(4, "little")
                        header[24:28] = index.to_bytes(4, "little")
                        header[48:64] = block.hash  # its own parent
                        record = stamp.to_bytes(STAMP_NBYTES, "little") + bytes(header)
                        txn.put(key(block.hash), record, db=blocks)

        await asyncio.to_thread(write)
        async with open_lmdb(tmp_path) as tier:
            if stamp >= 2**63:
                # begun anew: no stamp would be left for what comes
                await eventually(lambda: tier.counters()["begun_anew_total"] == 1 and tier.usable)
                assert await pair.fetch(tier) == 0
            else:
                assert await pair.fetch(tier) == 2
                for block in pair.blocks[2:6]:
                    await tier.get(pair.far.store, [block], deadline=soon(), arrived=bool)
                await eventually(lambda: tier.counters()["removed_blocks_total"] == 4)
            await pair.keep(tier)
            assert await pair.fetch(tier) == 12
            counts = tier.counters()
            assert [counts.get(name, 0) for name in TROUBLES] == [0] * len(TROUBLES)

    asyncio.run(run())
