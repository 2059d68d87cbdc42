"""A prompt's fetch in simulated time, from tiers and peers in memory."""

import asyncio
from collections.abc import Sequence

from cachemgr import BlockHash
from cachemgr.shard import BlockAddress
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.fetching import TieredFetch
from tests.cachemgr.tiers.doubles import PeersDouble, StoreDouble, TierDouble, names
from tests.cachemgr.tiers.simulated_time import clock

CHAIN = names(32)
BLOCK_S = 0.015
ALL_S = len(CHAIN) * BLOCK_S


class Rig:
    """A store, and what is beyond it."""

    def __init__(
        self, *tiers: TierDouble, peers: PeersDouble | None = None, store: StoreDouble | None = None
    ) -> None:
        self.store = store or StoreDouble()
        self.came: list[tuple[str, list[int]]] = []
        self.fetching = TieredFetch(peers, tiers, clock=clock, came=self._came)

    def _came(self, store: StoreDouble, blocks: Sequence[BlockAddress], tier: LowerTier) -> None:
        self.came.append((tier.name, [block.index for block in blocks]))

    async def fetch(
        self,
        chain: Sequence[BlockHash] = CHAIN,
        *,
        block_s: float | None = BLOCK_S,
        limit_s: float = 60.0,
    ) -> float:
        """What it took."""
        began = clock()
        await self.fetching.fetch(self.store, chain, deadline=began + limit_s, block_s=block_s)
        return clock() - began

    def figure(self, tier: str, name: str) -> float:
        return self.fetching.counters()[tier][f"tier_{name}_total"]

    def forgotten(self) -> bool:
        """Is nothing on its way, and nothing kept about what was?"""
        return self.fetching.idle and not len(self.fetching._flights)


async def settle() -> None:
    """What was cancelled hears of it, and those who wait for its end."""
    for _ in range(4):
        await asyncio.sleep(0)


def redis(**options: float) -> TierDouble:
    return TierDouble("redis", CHAIN, **options)


def lmdb(**options: float) -> TierDouble:
    return TierDouble("lmdb", CHAIN, **options)
