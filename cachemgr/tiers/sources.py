"""What is beyond this process: other nodes, and the tiers below.

Threads: the IO loop.
"""

from collections.abc import Callable, Sequence

from cachemgr.cluster.node import ClusterNode
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.tiers.contract import LowerTier

PEER = "peer"


class Sources:
    """`open` it before the first store, `close` it after the last."""

    def __init__(
        self, node: ClusterNode | None, tiers: Sequence[LowerTier], *, clock: Callable[[], float]
    ) -> None:
        self.node = node
        self._tiers = tiers
        self._clock = clock

    async def open(self) -> None:
        """Begin; what raises here leaves nothing behind."""
        if self.node is not None:
            await self.node.open()

    def take_in(self, store: HostStore) -> None:
        """A cache was opened."""
        if self.node is not None:
            self.node.take_in(store)

    async def fetch(
        self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float, block_s: float | None
    ) -> None:
        """Bring what is missing of a chain until `deadline`; `block_s`: what computing a block would take."""
        if self.node is not None:
            await self.node.fetch(store, hashes, deadline=deadline)

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of a chain was committed in `store`."""
        if self.node is not None:
            self.node.offer(store, hashes, index)

    def used(self, store: HostStore, hashes: Sequence[BlockHash]) -> None:
        """A chain, from its front, was found in `store` and is used once more."""

    async def forget(self, store: HostStore) -> None:
        """Nothing here uses `store` any more when this returns."""
        if self.node is not None:
            await self.node.forget(store)

    def counters(self) -> dict[str, dict[str, float]]:
        """By tier: totals (`…_total`) and gauges (every other name)."""
        return {PEER: self.node.counters()} if self.node is not None else {}

    async def close(self) -> None:
        """Let go of everything."""
        if self.node is not None:
            await self.node.close()
