"""Rows of the LMDB tier beside py-lmdb alone, in a folder of its own on the same disk.

Both move the same blocks, and write as many in one transaction, which waits for the disk. Whoever uses
py-lmdb reads a payload as one view of the map, copies it into aligned memory and checks its tag, as the tier
does, and writes from the arena without a copy, as the tier does. What is read is in the kernel's memory, not
on the disk.
"""

import importlib
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cachemgr import LmdbTierSettings
from cachemgr.tiers.lmdb_tier import open_lmdb_tier
from scripts.bench.harness import Measurement, Paired, Reading, alternate
from scripts.bench.tier_store import Blocks, Copies, OpenTier, blocks_here, open_tier

_BLOCKS = 64
"""As many as the tier writes in one transaction by default."""
_MAX_BYTES = 4 << 30
_READ_ROUNDS, _WRITE_ROUNDS = 25, 9


def measurements(home: Path) -> list[Measurement]:
    """All measurements of this file."""
    get, put = "tiers.lmdb.1mib.get_vs_raw", "tiers.lmdb.1mib.put_vs_raw"
    return [
        Measurement((get,), partial(_get, get, home)),
        Measurement((put,), partial(_put, put, home)),
    ]


class PyLmdb:
    """The same blocks through py-lmdb alone: a payload under its name, the header under another."""

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        folder.mkdir()
        self._env: Any = importlib.import_module("lmdb").open(str(folder), map_size=_MAX_BYTES)
        self._blocks = blocks
        self._copies = Copies(blocks)

    def get(self) -> float:
        """Seconds to have all, checked, in memory of our own."""
        started = time.perf_counter()
        with self._env.begin(buffers=True) as transaction:
            for index, address in enumerate(self._blocks.addresses):
                header = bytes(transaction.get(_header_key(address.hash)))
                self._copies.take(index, header, transaction.get(address.hash), address)
        return time.perf_counter() - started

    def put(self) -> float:
        """Seconds to write all in one transaction."""
        started = time.perf_counter()
        store = self._blocks.store
        shards = [one for one in store.hold(self._blocks.names) if one is not None]
        if len(shards) != len(self._blocks.names):
            raise RuntimeError("a block was not here")
        with self._env.begin(write=True) as transaction:
            for shard in shards:
                transaction.put(shard.address.hash, shard.payload)
                transaction.put(_header_key(shard.address.hash), shard.header)
        store.let_go(shards)
        return time.perf_counter() - started

    def close(self) -> None:
        """Close the files."""
        self._env.close()


def _header_key(name: bytes) -> bytes:
    return name + b"header"


def _get(row: str, home: Path) -> Iterator[Reading]:
    with _both(home) as (blocks, tier, raw):
        raw.put()
        tier.put(blocks)
        blocks.drop()

        def ours() -> float:
            seconds = tier.get(blocks)
            blocks.drop()
            return seconds

        paired = alternate(raw.get, ours, rounds=_READ_ROUNDS, warmups=2)
    yield _reading(row, paired, blocks, done="read and checked")


def _put(row: str, home: Path) -> Iterator[Reading]:
    with _both(home) as (blocks, tier, raw):

        def ours() -> float:
            blocks.renew()
            return tier.put(blocks)

        paired = alternate(ours, raw.put, rounds=_WRITE_ROUNDS, warmups=1)
    yield _reading(row, Paired(paired.b, paired.a), blocks, done="written and synced")


@contextmanager
def _both(home: Path) -> Iterator[tuple[Blocks, OpenTier, PyLmdb]]:
    with blocks_here(home, mib=1, count=_BLOCKS) as (blocks, folder):
        settings = LmdbTierSettings(path=str(folder / "tier"), max_bytes=_MAX_BYTES)
        with (
            open_tier(partial(open_lmdb_tier, settings)) as tier,
            closing(PyLmdb(folder / "raw", blocks)) as raw,
        ):
            yield blocks, tier, raw


def _reading(row: str, paired: Paired, blocks: Blocks, *, done: str) -> Reading:
    """The ratio of rates: their time over ours."""
    theirs, ours = (blocks.nbytes / seconds / 1e9 for seconds in paired.medians)
    count, pairs = len(blocks.addresses), len(paired.a)
    detail = f"{ours:.2f} GB/s against {theirs:.2f} GB/s of py-lmdb, {count} blocks {done}, {pairs} pairs"
    return Reading(row, paired.ratio, detail)
