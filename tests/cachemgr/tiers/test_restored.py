"""Blocks that the host tier let go of come back from a real Redis and a real LMDB, byte for byte."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cachemgr import BlockHash, HostCache, LmdbTierSettings, RedisTierSettings, open_cache
from cachemgr.contract import RemoteTiers
from cachemgr.host_contract import HostStore
from cachemgr.joining import open_beyond
from cachemgr.tiers.beyond import OpenedBeyond
from tests.cachemgr.host import FORMAT, SECRETS, Host, chain, fill, payload_of
from tests.redis_server import RedisServer, redis_server  # noqa: F401  # fixture
from tests.waiting import LIMIT_S, wait_until

BLOCKS = 16
"""Room in the host tier."""


class Below:
    """A cache and what is below it."""

    def __init__(
        self, host: Host, stack: ExitStack, *, redis: RedisServer | None = None, lmdb: Path | None = None
    ) -> None:
        settings = host.settings(blocks=BLOCKS)
        self.beyond: OpenedBeyond = stack.enter_context(
            closing(
                open_beyond(
                    settings,
                    redis=_in_redis(redis.url) if redis is not None else None,
                    lmdb=LmdbTierSettings(path=str(lmdb), batch_s=0.05) if lmdb is not None else None,
                )
            )
        )
        cache = open_cache(FORMAT, settings, SECRETS, remote=self._keep)
        self.cache: HostCache = stack.enter_context(closing(cache))

    def figure(self, tier: str, name: str) -> float:
        return self.beyond.counters().get(tier, {}).get(name, 0.0)

    def lose(self, hashes: Sequence[BlockHash]) -> None:
        """The host tier lets go of them, whatever its policy would keep."""
        self._store.drop(hashes)
        assert self.cache.lookup(hashes) == 0

    def _keep(self, store: HostStore) -> RemoteTiers:
        self._store = store
        return self.beyond.tiers(store)

    def brought(self, hashes: Sequence[BlockHash], *, block_s: float | None = None) -> int:
        """Ask for a prompt and check every byte; how many blocks came."""
        lease = self.cache.acquire(hashes, deadline=time.monotonic() + LIMIT_S, block_s=block_s)
        wait_until(lambda: lease.ready)
        got: dict[int, bytes] = {}

        def sink(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
            got.update((block, payload.tobytes()) for block, payload in zip(blocks, payloads, strict=True))

        usable = self.cache.restore(lease, first=0, sink=sink)
        lease.release()
        assert got == {at: payload_of(hashes[at]).tobytes() for at in range(usable)}
        return usable


def _in_redis(url: str) -> RedisTierSettings:
    return RedisTierSettings(url=url, admit_seen=1, call_s=0.5, breaker_s=0.2)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("tier", ["redis", "lmdb"])
def test_what_the_host_tier_let_go_comes_back(
    tier: str,
    host: Host,
    stack: ExitStack,
    tmp_path: Path,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    where = {"redis": redis_server} if tier == "redis" else {"lmdb": tmp_path / "lmdb"}
    below = Below(host, stack, **where)  # type: ignore[arg-type]
    hashes = chain(below.cache, BLOCKS)
    fill(below.cache, hashes)
    wait_until(lambda: below.figure(tier, "tier_put_blocks_total") >= BLOCKS)
    below.lose(hashes)
    assert below.brought(hashes) == BLOCKS
    wait_until(lambda: below.figure(tier, "tier_fetched_blocks_total") >= BLOCKS)
    below.lose(hashes)
    assert below.brought(hashes, block_s=60.0) == BLOCKS


def test_what_came_from_the_disk_goes_up(
    host: Host,
    stack: ExitStack,
    tmp_path: Path,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    below = Below(host, stack, redis=redis_server, lmdb=tmp_path / "lmdb")
    hashes = chain(below.cache, BLOCKS)
    fill(below.cache, hashes)
    wait_until(lambda: below.figure("lmdb", "tier_put_blocks_total") >= BLOCKS)
    redis_server.kill()
    redis_server.start()
    below.lose(hashes)
    wait_until(lambda: below.brought(hashes) == BLOCKS)
    assert below.figure("redis", "tier_fetched_blocks_total") == 0
    wait_until(lambda: below.figure("redis", "tier_offered_blocks_total") >= 2 * BLOCKS)


def test_a_redis_that_stands_still_is_a_miss_and_used_again_unaided(
    host: Host,
    stack: ExitStack,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    below = Below(host, stack, redis=redis_server)
    hashes = chain(below.cache, BLOCKS)
    fill(below.cache, hashes)
    wait_until(lambda: below.figure("redis", "tier_put_blocks_total") >= BLOCKS)
    below.lose(hashes)
    redis_server.pause()
    assert [below.brought(hashes, block_s=0.01) for _ in range(5)] == [0] * 5
    redis_server.resume()
    wait_until(lambda: below.brought(hashes, block_s=0.01) == BLOCKS)


def test_a_disk_keeps_them_for_the_next_process(host: Host, tmp_path: Path, stack: ExitStack) -> None:
    with ExitStack() as before:
        below = Below(host, before, lmdb=tmp_path / "lmdb")
        hashes = chain(below.cache, BLOCKS)
        fill(below.cache, hashes)
        wait_until(lambda: below.figure("lmdb", "tier_put_blocks_total") >= BLOCKS)
    for arena in host.arenas():
        arena.unlink()
    below = Below(host, stack, lmdb=tmp_path / "lmdb")
    assert below.cache.lookup(hashes) == 0
    wait_until(lambda: below.brought(hashes) == BLOCKS)
