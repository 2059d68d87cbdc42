"""Rows of the Redis tier beside redis-py with hiredis, on the same server over loopback.

Both move the same blocks, as many at a time. Whoever uses redis-py copies what comes into aligned memory and
checks its tag, as the tier does, and writes what it keeps from the arena, as the tier does.
"""

import importlib
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cachemgr import RedisTierSettings
from cachemgr.shard import HEADER_NBYTES
from cachemgr.tiers.redis_tier import open_redis_tier
from scripts.bench.goals import REDIS_MIBS
from scripts.bench.harness import Measurement, Paired, Reading, alternate
from scripts.bench.redis_server import redis_server
from scripts.bench.tier_store import Blocks, Copies, OpenTier, blocks_here, open_tier, windows

_ROUND_NBYTES = 64 << 20
_ROUNDS = 15
CLUSTER = "bench"


def measurements(home: Path) -> list[Measurement]:
    """All measurements of this file."""
    rows = [(f"tiers.redis.{mib}mib.get_vs_raw", partial(_get, mib=mib)) for mib in REDIS_MIBS]
    rows += [(f"tiers.redis.{mib}mib.put_vs_raw", partial(_put, mib=mib)) for mib in REDIS_MIBS]
    return [Measurement((row,), partial(measure, row, home)) for row, measure in rows]


class RedisPy:
    """The same blocks through redis-py alone."""

    def __init__(self, port: int, blocks: Blocks, settings: RedisTierSettings) -> None:
        self._client: Any = importlib.import_module("redis").Redis(host="127.0.0.1", port=port)
        self._blocks = blocks
        self._copies = Copies(blocks)
        value_nbytes = HEADER_NBYTES + blocks.store.payload_nbytes
        self._reads = list(windows(blocks.addresses, value_nbytes, settings.window_bytes))
        self._writes = list(windows(blocks.addresses, value_nbytes, settings.batch_bytes))
        self._ttl_ms = int(1000 * settings.ttl_s)

    def get(self) -> float:
        """Seconds to have all, checked, in memory of our own."""
        started = time.perf_counter()
        for window in self._reads:
            pipeline = self._client.pipeline(transaction=False)
            for index in window:
                pipeline.get(self._blocks.names[index])
            for index, value in zip(window, pipeline.execute(), strict=True):
                payload = memoryview(value)[HEADER_NBYTES:]
                self._copies.take(index, value[:HEADER_NBYTES], payload, self._blocks.addresses[index])
        return time.perf_counter() - started

    def put(self) -> float:
        """Seconds to write all."""
        started = time.perf_counter()
        store, names = self._blocks.store, self._blocks.names
        for window in self._writes:
            shards = [one for one in store.hold(names[window.start : window.stop]) if one is not None]
            pipeline = self._client.pipeline(transaction=False)
            for shard in shards:
                pipeline.set(shard.address.hash, b"".join((shard.header, shard.payload)), px=self._ttl_ms)
            if len(pipeline.execute()) != len(window):
                raise RuntimeError("a block was not here")
            store.let_go(shards)
        return time.perf_counter() - started

    def empty(self) -> None:
        """Have the server forget everything."""
        self._client.flushall()

    def close(self) -> None:
        """End the connection."""
        self._client.close()


@contextmanager
def _both(home: Path, mib: int) -> Iterator[tuple[Blocks, OpenTier, RedisPy]]:
    count = _ROUND_NBYTES // (mib << 20)
    with redis_server() as port, blocks_here(home, mib=mib, count=count) as (blocks, _):
        settings = RedisTierSettings(url=f"redis://127.0.0.1:{port}")
        with (
            open_tier(partial(open_redis_tier, settings, cluster=CLUSTER)) as tier,
            closing(RedisPy(port, blocks, settings)) as raw,
        ):
            yield blocks, tier, raw


def _get(row: str, home: Path, *, mib: int) -> Iterator[Reading]:
    with _both(home, mib) as (blocks, tier, raw):
        raw.put()
        tier.put(blocks)
        blocks.drop()

        def ours() -> float:
            seconds = tier.get(blocks)
            blocks.drop()
            return seconds

        paired = alternate(raw.get, ours, rounds=_ROUNDS, warmups=2)
    yield _reading(row, paired, blocks, done="read and checked")


def _put(row: str, home: Path, *, mib: int) -> Iterator[Reading]:
    with _both(home, mib) as (blocks, tier, raw):

        def ours() -> float:
            raw.empty()
            if tier.known(blocks):  # and so the tier sees that it has to write all of them
                raise RuntimeError("the server was not empty")
            return tier.put(blocks)

        def theirs() -> float:
            raw.empty()
            return raw.put()

        paired = alternate(theirs, ours, rounds=_ROUNDS, warmups=2)
    yield _reading(row, paired, blocks, done="written")


def _reading(row: str, paired: Paired, blocks: Blocks, *, done: str) -> Reading:
    """The ratio of rates: their time over ours."""
    theirs, ours = (blocks.nbytes / seconds / 1e9 for seconds in paired.medians)
    count, pairs = len(blocks.addresses), len(paired.a)
    detail = f"{ours:.2f} GB/s against {theirs:.2f} GB/s of redis-py, {count} blocks {done}, {pairs} pairs"
    return Reading(row, paired.ratio, detail)
