"""Disks that are full, read-only, broken or silent: fewer hits, no wrong block, and it heals by itself."""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from cachemgr.tiers.lmdb_tier.database import Change, Snapshot
from cachemgr.tiers.lmdb_tier.record import keys_of, piece_key
from tests import full_disk
from tests.cachemgr.host import Host
from tests.cachemgr.tiers.lmdb_tier.rig import child, count, end, files_nbytes, line_of, opened
from tests.cachemgr.tiers.rig import WIDE, Pair, addresses, chain_of, eventually, soon, whole_run

BLOCKS = 20


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.message for record in caplog.records)


def test_a_full_disk_is_said_once_and_costs_only_what_is_not_written(
    host: Host, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pair = Pair(host, block_format=WIDE)
    more = chain_of(pair.near, BLOCKS, block_format=WIDE, seed=1)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
            with full_disk.room_for((folder / "blocks" / "data.mdb").stat().st_size):
                tier.put(pair.near.store, addresses(more))
                await eventually(lambda: count(tier, "disk_errors_total"))
                await eventually(lambda: count(tier, "put_dropped_total"))
                assert said(caplog, "in trouble") == 1
                assert tier.usable
                known = await tier.known(pair.far.store, pair.blocks, deadline=soon())
                assert known
                assert await pair.fetch(tier) == known, "what is there can be read"
            await asyncio.sleep(12 * 0.05)  # retry_s: from now on the file may grow again
            await pair.keep(tier, addresses(more))
            await eventually(lambda: said(caplog, "works again") == 1)

    asyncio.run(run())


def test_a_disk_that_stays_full_keeps_the_newest_blocks(host: Host, folder: Path) -> None:
    """The file cannot grow to its bound: blocks go for others in what there is of it."""
    pair = Pair(host, blocks=32, block_format=WIDE)
    newer = [chain_of(pair.near, 2, block_format=WIDE, seed=seed) for seed in range(1, 20)]

    async def run() -> None:
        async with opened(folder, max_bytes=64 << 20, batch_bytes=1 << 20) as tier:
            await pair.keep(tier)
            size = (folder / "blocks" / "data.mdb").stat().st_size
            with full_disk.room_for(size):
                for names in newer:
                    before = count(tier, "put_blocks_total") + count(tier, "put_dropped_total")
                    tier.put(pair.near.store, addresses(names))
                    await eventually(
                        lambda then=before: (
                            count(tier, "put_blocks_total") + count(tier, "put_dropped_total") == then + 2
                        )
                    )
                assert await tier.known(pair.far.store, addresses(newer[-1]), deadline=soon()) == 2
                assert count(tier, "put_dropped_total") <= 4 * 2
                assert count(tier, "entries") >= 8

    asyncio.run(run())


def test_a_disk_that_is_full_at_the_start(host: Host, folder: Path) -> None:
    pair = Pair(host)

    async def run() -> None:
        with full_disk.room_for(0):
            async with opened(folder, usable=False) as tier:
                await eventually(lambda: count(tier, "disk_errors_total") >= 2)
                assert not tier.usable
                assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
                tier.put(pair.near.store, pair.blocks)
        async with opened(folder) as tier:
            await pair.keep(tier)

    asyncio.run(run())


def test_a_path_that_is_no_folder_is_tried_again(
    host: Host, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(host)
    folder.write_text("a file")

    async def run() -> None:
        async with opened(folder, usable=False) as tier:
            await eventually(lambda: count(tier, "disk_errors_total") >= 3)
            assert said(caplog, "in trouble") == 1
            assert not tier.usable
            folder.unlink()
            await eventually(lambda: tier.usable)
            await pair.keep(tier)

    asyncio.run(run())


def test_a_folder_that_may_not_be_written_is_read(host: Host, folder: Path) -> None:
    pair = Pair(host)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
        with readable_only(folder) as user, child("reading_process.py", folder, *user) as reader:
            assert line_of(reader) == "usable"
            assert line_of(reader) == f"brought {BLOCKS}"
            assert line_of(reader) == "not writer 1"
            async with opened(folder) as tier:
                assert not count(tier, "writer"), "who only reads keeps writers out while he does"
            end(reader)

    asyncio.run(run())


class readable_only:  # noqa: N801
    """The folder may be read and not be written by the user, if any, that this names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> tuple[int, ...]:
        self._modes(0o555, 0o444)
        return (65534,) if os.getuid() == 0 else ()  # root may write everywhere

    def __exit__(self, *error: object) -> None:
        self._modes(0o700, 0o600)

    def _modes(self, of_folders: int, of_files: int) -> None:
        self._folder.parent.chmod(0o755)
        for path in (self._folder, *self._folder.rglob("*")):
            path.chmod(of_folders if path.is_dir() else of_files)


@pytest.mark.parametrize("content", [b"", b"no environment of LMDB " * 1000])
def test_files_that_are_not_lmdbs_are_begun_anew(host: Host, folder: Path, content: bytes) -> None:
    pair = Pair(host)
    (folder / "blocks").mkdir(parents=True)
    (folder / "blocks" / "data.mdb").write_bytes(content)

    async def run() -> None:
        async with opened(folder) as tier:
            assert count(tier, "begun_anew_total") == bool(content)
            await pair.keep(tier)
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())


def test_more_than_a_smaller_bound_is_begun_anew(host: Host, folder: Path) -> None:
    pair = Pair(host, block_format=WIDE)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
        async with opened(folder, max_bytes=4 << 20) as tier:
            assert count(tier, "begun_anew_total") == 1
            assert files_nbytes(folder) <= 4 << 20

    asyncio.run(run())


def test_lazy_writes_of_another_boot_are_not_trusted(host: Host, folder: Path) -> None:
    pair = Pair(host)

    async def run() -> None:
        async with opened(folder, sync="lazy") as tier:
            await pair.keep(tier)
            marked = (folder / "unsynced").read_text()
        assert not (folder / "unsynced").exists(), "closed cleanly: all is on disk"
        async with opened(folder, sync="lazy") as tier:
            assert await pair.fetch(tier) == BLOCKS
        (folder / "unsynced").write_text(marked)  # killed, and the machine was not started anew
        async with opened(folder) as tier:
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == BLOCKS
            assert not (folder / "unsynced").exists()
        (folder / "unsynced").write_text("another boot")
        async with opened(folder) as tier:
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
            assert count(tier, "begun_anew_total") == 1

    asyncio.run(run())


def test_bytes_that_are_wrong_are_a_miss_removed_and_counted(host: Host, folder: Path) -> None:
    pair = Pair(host)
    key = keys_of(pair.near.store.format_id)

    def spoil() -> None:
        """Block 5 flipped, 9 short, 12 another block's, the header of 15 garbage."""
        with lmdb.open(str(folder / "blocks"), map_size=64 << 20, max_dbs=2) as env:
            pieces, blocks = env.open_db(b"pieces"), env.open_db(b"blocks")
            where = [piece_key(key(name), 0) for name in pair.names]
            with env.begin(write=True) as txn:
                whole = [txn.get(place, db=pieces) for place in where]
                txn.put(where[5], bytes([whole[5][0] ^ 1]) + whole[5][1:], db=pieces)
                txn.put(where[9], whole[9][:-1], db=pieces)
                txn.put(where[12], whole[3], db=pieces)
                record = txn.get(key(pair.names[15]), db=blocks)
                txn.put(key(pair.names[15]), record[:8] + bytes(128), db=blocks)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
        spoil()
        async with opened(folder) as tier:
            for number, wrong in enumerate((5, 9, 12, 15), start=1):
                assert await pair.fetch(tier) == wrong
                assert count(tier, "corrupt_blocks_total") == number
                await eventually(lambda left=BLOCKS - 1: count(tier, "entries") == left)
                await pair.keep(tier)
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())


class Stuck:
    """A disk that answers only once it is let."""

    def __init__(self) -> None:
        self.met = threading.Event()
        self.go = threading.Event()

    def wait(self) -> None:
        self.met.set()
        assert self.go.wait(60)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    disk = Stuck()
    yield disk
    disk.go.set()


def test_a_read_that_hangs_holds_nobody_up(
    host: Host, folder: Path, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(host)
    piece = Snapshot.piece

    def late(snapshot: Snapshot, key: bytes, number: int) -> memoryview | None:
        stuck.wait()
        return piece(snapshot, key, number)

    async def run() -> None:
        async with opened(folder, call_s=0.2) as tier:
            await pair.keep(tier)
            monkeypatch.setattr(Snapshot, "piece", late)
            assert await pair.fetch(tier, seconds=0.1) == 0
            assert count(tier, "timeouts_total") == 1
            assert stuck.met.is_set()
            await eventually(lambda: not tier.usable)
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
            other = chain_of(pair.near, 3, seed=1)
            tier.put(pair.near.store, addresses(other))
            await eventually(lambda: count(tier, "put_blocks_total") == BLOCKS + 3)
            stuck.go.set()
            await eventually(lambda: tier.usable)
            assert pair.whole() == 0, "it was given up"
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())


def test_a_transaction_that_hangs_holds_up_no_read(
    host: Host, folder: Path, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(host)
    commit = Change.commit

    def late(change: Change) -> None:
        stuck.wait()
        commit(change)

    async def run() -> None:
        async with opened(folder, close_s=0.2) as tier:
            await pair.keep(tier)
            monkeypatch.setattr(Change, "commit", late)
            tier.put(pair.near.store, addresses(chain_of(pair.near, 3, seed=1)))
            await eventually(stuck.met.is_set)
            assert await pair.fetch(tier) == BLOCKS
            before = time.monotonic()
            await tier.forget(pair.near.store)  # what is committed was copied
            await tier.close()
            assert time.monotonic() - before < 10
            stuck.go.set()

    asyncio.run(run())


def test_a_folder_that_is_taken_away_is_made_again(host: Host, folder: Path) -> None:
    pair = Pair(host)

    async def run() -> None:
        async with opened(folder) as tier:
            await pair.keep(tier)
        shutil.rmtree(folder)
        async with opened(folder) as tier:
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
            await pair.keep(tier)
            assert whole_run(pair.near.store, pair.names) == BLOCKS

    asyncio.run(run())
