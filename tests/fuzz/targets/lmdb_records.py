"""What a folder on disk may hold: rows of any records, and blocks of any record and pieces."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from cachemgr.tiers.lmdb_tier.counts import LmdbCounts
from cachemgr.tiers.lmdb_tier.read_call import ReadCall
from cachemgr.tiers.lmdb_tier.reader import Reader
from cachemgr.tiers.lmdb_tier.record import RECORD_NBYTES, keys_of
from cachemgr.tiers.lmdb_tier.rows import Rows
from tests.fuzz.blocks import HELD, SHARD_NBYTES, nodes
from tests.fuzz.loop import run
from tests.fuzz.source import Source

_KEY = keys_of(nodes().near.store.format_id)
_STAMP = (5).to_bytes(8, "little")
_BOUND = 1 << 26
EXAMPLES = (
    b"\x00" + b"".join(_KEY(nodes().names[at]) + _STAMP + nodes().shard(at)[:128] for at in range(HELD)),
    b"\x00" + (_KEY(nodes().names[0]) + bytes(RECORD_NBYTES)) * 2,
    b"\x01" + b"".join(nodes().shard(at) for at in range(HELD)),
    b"\x01" + nodes().shard(0) + nodes().shard(0),
    b"\x01" + nodes().shard(0)[:300],
)


def target(data: bytes) -> None:
    source = Source(data)
    if source.byte() & 1:
        run(_read(source.rest()))
        nodes().check()
        nodes().reset()
    else:
        _load(source.rest())


def _load(data: bytes) -> None:
    size = 16 + RECORD_NBYTES
    starts = range(0, len(data) // size * size, size)
    listed = {data[at : at + 16]: data[at + 16 : at + size] for at in starts}
    rows, stamp = Rows.found(list(listed), list(listed.values()), bound=_BOUND)
    assert len(rows) == len(listed)
    assert 0 <= stamp < 2**64
    assert all(key in rows for key in listed)
    gone = rows.make_room(1 << 40, rows=1, most=1 << 20)
    assert len(gone) == len(listed), "a block that never goes"
    assert len(rows) == 0
    for row in gone:
        assert row.payload_nbytes < 2**32


class _Shelf:
    """Holds what is in `data`: shards one after another, of which the first is the first block's."""

    def __init__(self, data: bytes) -> None:
        self.shards = [data[at : at + SHARD_NBYTES] for at in range(0, len(data), SHARD_NBYTES)]
        self.keys = [_KEY(name) for name in nodes().names]
        self.wrong: list[bytes] = []

    @property
    def database(self) -> Any:
        return self

    @contextmanager
    def snapshot(self) -> Iterator["_Shelf"]:
        yield self

    def _shard(self, key: bytes) -> bytes:
        at = self.keys.index(key)  # type: ignore[arg-type]
        return self.shards[at] if at < len(self.shards) else b""

    def record(self, key: bytes) -> bytes | None:
        shard = self._shard(key)
        return _STAMP + shard[:128] if len(shard) >= 128 else None

    def piece(self, key: bytes, number: int) -> memoryview | None:
        piece = self._shard(key)[128:]
        return memoryview(piece) if piece and number == 0 else None

    def found_wrong(self, key: bytes, stamp: int) -> None:
        self.wrong.append(key)

    def used(self, keys: object) -> None:
        pass


async def _read(data: bytes) -> None:
    here, shelf, counts = nodes(), _Shelf(data), LmdbCounts()
    reader = Reader(cast(Any, shelf), counts, stuck_s=10.0)
    call = ReadCall(here.far.store, here.addresses, payload=True)
    reader._serve(call)
    call.end()
    await asyncio.wait_for(call.ended, 10.0)
    await asyncio.sleep(0.0)
    assert counts.failed_calls == 0, "a reader that failed"
    assert here.far.store.missing(here.names) == list(range(call.result, len(here.names)))
    assert len(shelf.wrong) <= 1
