"""Files that something else than the tier has spoiled: begun anew or read as far as they are whole."""

import asyncio
import os
from pathlib import Path

import lmdb
import pytest

from cachemgr.shard import HEADER_NBYTES
from cachemgr.tiers.lmdb_tier.record import STAMP_NBYTES, keys_of, piece_key
from tests.cachemgr.host import Host
from tests.cachemgr.tiers.lmdb_tier.rig import count, opened
from tests.cachemgr.tiers.rig import WIDE, Pair, eventually, soon

BLOCKS = 20
PAGE = 4096


def data_of(folder: Path) -> Path:
    return folder / "blocks" / "data.mdb"


async def write(pair: Pair, folder: Path) -> None:
    async with opened(folder) as tier:
        await pair.keep(tier)


async def works(pair: Pair, folder: Path, *, begun_anew: int) -> None:
    """What is kept now comes back: nothing was lost that had to be noticed first."""
    async with opened(folder) as tier:
        assert count(tier, "begun_anew_total") == begun_anew
        assert count(tier, "entries") == 0
        await pair.keep(tier)
        assert await pair.fetch(tier) == BLOCKS
        assert count(tier, "put_dropped_total") == 0


def test_records_that_cannot_be_read_are_begun_anew_at_the_start(host: Host, folder: Path) -> None:
    pair = Pair(host)

    def spoil() -> None:
        content = bytearray(data_of(folder).read_bytes())
        pages = [at for at in range(2 * PAGE, len(content), PAGE) if b"TCKV" in content[at : at + PAGE]]
        assert pages
        for at in pages:
            content[at : at + PAGE] = bytes(PAGE)
        data_of(folder).write_bytes(content)

    async def run() -> None:
        await write(pair, folder)
        spoil()
        await works(pair, folder, begun_anew=1)

    asyncio.run(run())


def test_records_of_another_size_are_begun_anew(host: Host, folder: Path) -> None:
    pair = Pair(host)

    def spoil() -> None:
        with (
            lmdb.open(str(folder / "blocks"), map_size=64 << 20, max_dbs=2) as env,
            env.begin(write=True) as txn,
        ):
            txn.put(bytes(16), b"of another version", db=env.open_db(b"blocks", txn=txn))

    async def run() -> None:
        await write(pair, folder)
        spoil()
        await works(pair, folder, begun_anew=1)

    asyncio.run(run())


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(host: Host, folder: Path, share: float) -> None:
    pair = Pair(host, block_format=WIDE)

    async def run() -> None:
        await write(pair, folder)
        os.truncate(data_of(folder), int(share * data_of(folder).stat().st_size))
        async with opened(folder) as tier:
            for _ in range(BLOCKS):
                whole = await pair.fetch(tier)
                await pair.keep(tier)
                if whole == BLOCKS:
                    break
            assert await tier.known(pair.near.store, pair.blocks, deadline=soon()) == BLOCKS
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())


def test_who_was_killed_while_he_began_anew_leaves_nothing_for_ever(host: Host, folder: Path) -> None:
    """The next process may have the same number."""
    pair = Pair(host)
    left = folder / f"gone-{os.getpid()}"

    def leave() -> None:
        left.mkdir(parents=True)
        (left / "data.mdb").write_bytes(bytes(PAGE))

    async def run() -> None:
        leave()
        await works(pair, folder, begun_anew=0)
        assert not left.exists(), "the bound is of all files"
        leave()
        data_of(folder).write_bytes(b"no environment of LMDB " * 1000)
        await works(pair, folder, begun_anew=1)
        assert not left.exists()

    asyncio.run(run())


def test_what_is_removed_takes_no_room_any_more(host: Host, folder: Path) -> None:
    """However much its record says that it has."""
    pair = Pair(host, block_format=WIDE)
    key = keys_of(pair.near.store.format_id)(pair.names[5])

    def pieces(*, spoil: bool = False) -> int:
        with lmdb.open(str(folder / "blocks"), map_size=64 << 20, max_dbs=2) as env:
            blocks, pieces = env.open_db(b"blocks"), env.open_db(b"pieces")
            with env.begin(write=True) as txn:
                if spoil:
                    record = txn.get(key, db=blocks)
                    txn.put(key, record[:STAMP_NBYTES] + bytes(HEADER_NBYTES), db=blocks)
                return int(txn.get(piece_key(key, 0), db=pieces) is not None)

    async def run() -> None:
        await write(pair, folder)
        assert pieces(spoil=True) == 1
        async with opened(folder) as tier:
            before = count(tier, "bytes")
            assert await pair.fetch(tier) == 5
            await eventually(lambda: count(tier, "removed_blocks_total") == 1)
            await eventually(lambda: count(tier, "bytes") <= before - WIDE.payload_nbytes)
            bytes_said = count(tier, "bytes")
        assert pieces() == 0
        async with opened(folder) as tier:
            assert count(tier, "bytes") == bytes_said

    asyncio.run(run())
