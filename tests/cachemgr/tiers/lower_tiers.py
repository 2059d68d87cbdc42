"""The lower tiers that every behaviour test runs on; a new one is added here and nowhere else.

Each opens a started tier of its own, without anything in it, in a folder, and closes it. A block is admitted
when it is put: who counts how often it was seen is not the tier.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.lmdb_tier import LmdbTierSettings, open_lmdb_tier
from cachemgr.tiers.redis_tier import RedisTierSettings, open_redis_tier
from tests.cachemgr.tiers.rig import eventually
from tests.redis_server import RedisServer

OpenLowerTier = Callable[..., AbstractAsyncContextManager[LowerTier]]
"""`open_tier(folder, queue_blocks=…)`."""


@asynccontextmanager
async def open_redis(folder: Path, *, queue_blocks: int = 4096) -> AsyncIterator[LowerTier]:
    with RedisServer(folder) as server:
        settings = RedisTierSettings(url=server.url, queue_blocks=queue_blocks, call_s=10.0)
        tier = open_redis_tier(settings, cluster="test")
        await tier.start()
        try:
            yield tier
        finally:
            await tier.close()


@asynccontextmanager
async def open_lmdb(folder: Path, *, queue_blocks: int = 4096) -> AsyncIterator[LowerTier]:
    path = str(folder / "lmdb")
    settings = LmdbTierSettings(path=path, max_bytes=64 << 20, batch_s=0.05, queue_blocks=queue_blocks)
    tier = open_lmdb_tier(settings)
    await tier.start()
    await eventually(lambda: tier.usable)
    try:
        yield tier
    finally:
        await tier.close()


LOWER_TIERS = [pytest.param(open_redis, id="redis"), pytest.param(open_lmdb, id="lmdb")]
