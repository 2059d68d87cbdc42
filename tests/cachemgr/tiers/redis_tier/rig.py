"""A tier on a real Redis for tests of faults: short deadlines, and steps that wait for what has to happen."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from cachemgr.shard import BlockAddress
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.redis_tier import RedisTierSettings, open_redis_tier
from cachemgr.tiers.redis_tier.keys import BlockKeys
from tests.cachemgr.tiers.rig import Pair, eventually, soon

CLUSTER = "test"
CALL_S = 0.3
MARGIN_S = 5.0
"""What a busy machine may take on top of a deadline: far less than waiting for the server would."""


@asynccontextmanager
async def tier_at(url: str, **options: Any) -> AsyncIterator[LowerTier]:
    settings = RedisTierSettings(url=url, **{"call_s": CALL_S, "breaker_s": 0.2, **options})
    tier = open_redis_tier(settings, cluster=CLUSTER)
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close()


def key_of(pair: Pair, block: BlockAddress) -> bytes:
    return BlockKeys(CLUSTER, pair.near.store.format_id).key(block)


def value_of(pair: Pair, index: int) -> bytes:
    held = pair.near.hold_one(pair.names[index])
    value = held.header + bytes(held.payload)
    pair.near.store.let_go([held])
    return value


async def until_usable(tier: LowerTier) -> None:
    """The breaker has closed, by itself."""
    await eventually(lambda: tier.usable)


async def until_down(tier: LowerTier) -> None:
    """The breaker has opened, by itself."""
    await eventually(lambda: not tier.usable)


async def in_time(call: Callable[[], Any], *, limit_s: float) -> Any:
    """The result of a call that must not take longer than `limit_s`, and a margin for the machine."""
    began = time.monotonic()
    async with asyncio.timeout(limit_s + MARGIN_S):
        result = await call()
    assert time.monotonic() - began < limit_s + MARGIN_S
    return result


async def asked_until_down(tier: LowerTier, pair: Pair) -> None:
    """Asks as requests do until the breaker opens: each ends within its deadline, and finds nothing."""
    while tier.usable:
        known = await in_time(
            lambda: tier.known(pair.far.store, pair.blocks, deadline=soon(CALL_S)), limit_s=CALL_S
        )
        assert known == 0
