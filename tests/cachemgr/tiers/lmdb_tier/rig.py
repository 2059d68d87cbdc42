"""A tier on a folder, and nodes beside it: what the tests of the LMDB tier have in common."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress, address_of
from cachemgr.tiers.lmdb_tier import LmdbTierSettings
from cachemgr.tiers.lmdb_tier.tier import LmdbTier

MIB = 1 << 20
PROMPTLY: dict[str, float] = {"batch_s": 0.01, "retry_s": 0.05}


def addresses(hashes: Sequence[BlockHash]) -> list[BlockAddress]:
    return [address_of(hashes, index) for index in range(len(hashes))]


def settings_of(path: Path, **options: object) -> LmdbTierSettings:
    return LmdbTierSettings(path=str(path), **{**PROMPTLY, "max_bytes": 16 * MIB, **options})  # type: ignore[arg-type]


@asynccontextmanager
async def opened(path: Path, *, usable: bool = True, **options: object) -> AsyncIterator[LmdbTier]:
    """A tier that runs; closed at the end."""
    tier = LmdbTier(settings_of(path, **options))
    await tier.start()
    try:
        if usable:
            await until(lambda: tier.usable)
        yield tier
    finally:
        await tier.close()


async def until(condition: object, *, limit_s: float = 20.0) -> None:
    """Wait on the loop until `condition()` holds."""
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)


def count(tier: LmdbTier, name: str) -> int:
    return int(tier.counters()[name])


async def keep(tier: LmdbTier, store: HostStore, hashes: Sequence[BlockHash]) -> None:
    """Put a chain, and wait until it is written or dropped."""
    before = done(tier)
    new = len(hashes) - await tier.known(store, addresses(hashes), deadline=soon())
    tier.put(store, addresses(hashes))
    await until(lambda: done(tier) - before >= new)


def done(tier: LmdbTier) -> int:
    return sum(count(tier, f"put_{end}_total") for end in ("blocks", "dropped", "gone", "not_writer"))


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


async def bring(
    tier: LmdbTier, store: HostStore, hashes: Sequence[BlockHash], *, limit_s: float = 10.0
) -> int:
    """Get a chain; how many blocks came."""
    sizes: list[int] = []
    await tier.get(store, addresses(hashes), deadline=soon(limit_s), arrived=sizes.append)
    assert all(nbytes == store.payload_nbytes for nbytes in sizes)
    return len(sizes)
