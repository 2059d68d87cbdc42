"""Rows of the bulk channel: what fetching a block from another process costs, beside a bare copy and other
stores.

Every fetch is checked: ours into a slot of the arena, and published; Redis' with the same check on the bytes
it gave. What Mooncake and LMCache give is not checked, which is to their advantage.
"""

import asyncio
import importlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cachemgr.cluster.bulk.client import BulkClient
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.shard import HEADER_NBYTES, BlockAddress, ShardCheck, address_of
from scripts.bench.harness import Measurement, Paired, Reading, alternate, timed
from scripts.bench.peer_node import (
    OWNER,
    READER,
    BenchRings,
    CacheNode,
    PeerNode,
    mib_format,
    opened_node,
    settings,
)
from scripts.bench.peers import StoreKind, open_store
from scripts.bench.redis_server import redis_server
from scripts.bench.subject import Subject

_BLOCKS = 16
_ROUNDS = 25
_FETCHES = 2000
_PIECE_NBYTES = 256 << 10


def measurements(subject: Subject) -> list[Measurement]:
    """All measurements of this file."""
    small = ("peer.shm.1mib.vs_memcpy",)
    return [
        Measurement(small, partial(_beside_memcpy, small[0], 1)),
        Measurement(("peer.shm.4mib.vs_memcpy",), partial(_beside_memcpy, "peer.shm.4mib.vs_memcpy", 4)),
        Measurement(("peer.tcp.1mib.vs_redis",), partial(_beside_redis, "peer.tcp.1mib.vs_redis", 1)),
        Measurement(("peer.tcp.4mib.vs_redis",), partial(_beside_redis, "peer.tcp.4mib.vs_redis", 4)),
        Measurement(("peer.tcp.1mib.vs_mooncake",), partial(_beside_store, subject, "mooncake")),
        Measurement(("peer.tcp.1mib.vs_lmcache",), partial(_beside_store, subject, "lmcache")),
        Measurement(("peer.p99_over_p50",), _tail),
    ]


class Reader:
    """Fetches blocks of a node in another process, one after the other, on a loop of its own."""

    def __init__(self, node: CacheNode, peer: PeerNode, *, same_host: bool) -> None:
        self._node = node
        self._names = node.names(_BLOCKS)
        self._same_host = same_host
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._open(peer))
        self.blocks: list[BlockAddress] = [address_of(self._names, index) for index in range(_BLOCKS)]

    def fetch_all(self) -> float:
        """Seconds to fetch every block, one after the other."""
        seconds = sum(self._runner.run(self._fetch(self.blocks)))
        self.forget()
        return seconds

    def fetch_singly(self, count: int) -> list[float]:
        """Seconds of each of so many fetches."""
        taken: list[float] = []
        while len(taken) < count:
            taken += self._runner.run(self._fetch(self.blocks))
            self.forget()
        return taken[:count]

    def keep_all(self) -> None:
        """Fetch every block, and leave them here until `forget`."""
        self._runner.run(self._fetch(self.blocks))

    def forget(self) -> None:
        """The blocks are not here any more."""
        if self._node.store.drop(self._names) != _BLOCKS:
            raise RuntimeError("a fetched block was not here")

    def close(self) -> None:
        """End the connection and the loop."""
        self._runner.run(self._client.close())
        self._runner.close()

    async def _open(self, peer: PeerNode) -> BulkClient:
        async def door() -> BulkDoor:
            return peer.door(same_host=self._same_host)

        return BulkClient(
            OWNER, me=READER, open_channel=door, rings=BenchRings(READER),
            settings=settings(same_host=self._same_host),
        )  # fmt: skip

    async def _fetch(self, blocks: Sequence[BlockAddress]) -> list[float]:
        client, store = self._client, self._node.store
        deadline = time.monotonic() + 60
        taken = []
        for block in blocks:
            started = time.perf_counter()
            fetched = await client.get(store, [block], deadline=deadline)
            taken.append(time.perf_counter() - started)
            if fetched.arrived != (True,):
                raise RuntimeError("a block did not arrive")
        if client.in_place is not self._same_host:
            raise RuntimeError("the blocks did not come the way that is measured")
        return taken


@contextmanager
def _reader(mib: int, *, same_host: bool) -> Iterator[tuple[Reader, CacheNode]]:
    """A reader here and an owner of blocks of so many MiB in another process."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with opened_node(folder, READER, mib_format(mib), blocks=_BLOCKS + 2) as node:
            peer = PeerNode(folder, mib=mib, blocks=_BLOCKS)
            try:
                reader = Reader(node, peer, same_host=same_host)
                try:
                    yield reader, node
                finally:
                    reader.close()
            finally:
                peer.close()


def _beside_memcpy(row: str, mib: int) -> Iterator[Reading]:
    with _reader(mib, same_host=True) as (reader, _):
        sources = [np.full(mib << 20, number, np.uint8) for number in range(_BLOCKS)]
        targets = [np.zeros(mib << 20, np.uint8) for _ in range(_BLOCKS)]

        def copy() -> float:
            return sum(timed(partial(np.copyto, *pair)) for pair in zip(targets, sources, strict=True))

        paired = alternate(copy, reader.fetch_all, rounds=_ROUNDS, warmups=3)
    yield _reading(row, paired, mib, "a bare copy")


def _beside_redis(row: str, mib: int) -> Iterator[Reading]:
    with _reader(mib, same_host=False) as (reader, node), _redis() as redis:
        reader.keep_all()
        for block, shard in zip(reader.blocks, node.store.hold([b.hash for b in reader.blocks]), strict=True):
            if shard is None:
                raise RuntimeError("a block is missing")
            redis.set(block.hash, shard.header + bytes(shard.payload))
            node.store.let_go([shard])
        reader.forget()

        def get() -> float:
            return sum(timed(partial(_get_checked, redis, node, block)) for block in reader.blocks)

        paired = alternate(get, reader.fetch_all, rounds=_ROUNDS, warmups=3)
    yield _reading(row, paired, mib, "redis-py with hiredis, checked")


def _beside_store(subject: Subject, kind: StoreKind) -> Iterator[Reading]:
    with open_store(kind, subject.peers) as store, _reader(1, same_host=False) as (reader, _):

        def get() -> float:
            return float(store.ask("get", {"mib": 1, "blocks": _BLOCKS})["seconds"])

        paired = alternate(get, reader.fetch_all, rounds=_ROUNDS, warmups=3)
    yield _reading(f"peer.tcp.1mib.vs_{kind}", paired, 1, f"{kind}, unchecked")


def _tail() -> Iterator[Reading]:
    with _reader(1, same_host=False) as (reader, _):
        reader.fetch_singly(100)
        taken = np.array(reader.fetch_singly(_FETCHES))
    median, last = (float(np.quantile(taken, q)) for q in (0.5, 0.99))
    detail = f"p50 {1e6 * median:.0f} µs, p99 {1e6 * last:.0f} µs, {_FETCHES} fetches of 1 MiB over TCP"
    yield Reading("peer.p99_over_p50", last / median, detail)


def _reading(row: str, paired: Paired, mib: int, other: str) -> Reading:
    """The ratio of rates: their time over ours."""
    theirs, ours = (_BLOCKS * (mib << 20) / seconds / 1e9 for seconds in paired.medians)
    detail = f"{ours:.2f} GB/s checked against {theirs:.2f} GB/s of {other}"
    return Reading(row, paired.ratio, detail)


def _get_checked(redis: Any, node: CacheNode, block: BlockAddress) -> None:
    data = memoryview(redis.get(block.hash))
    check = node.store.check(bytes(data[:HEADER_NBYTES]), block)
    if not isinstance(check, ShardCheck):
        raise RuntimeError(f"{check} from Redis")
    for start in range(HEADER_NBYTES, len(data), _PIECE_NBYTES):
        check.update(data[start : start + _PIECE_NBYTES])
    if not check.passed():
        raise RuntimeError("a block from Redis did not pass")


@contextmanager
def _redis() -> Iterator[Any]:
    """A client of a real server."""
    with redis_server() as port:
        client = importlib.import_module("redis").Redis(host="127.0.0.1", port=port)
        try:
            yield client
        finally:
            client.close()
