"""What is beyond this process: other nodes, and the tiers below. Either may be missing.

    fetch ── fetching     peers, then the tiers, as far as it pays;  without tiers: what peers have
    offer ─┬ node         to the owners of the block
           └ demotion     to the tiers;  what is `used` too, and what came from a tier, to those before it

Threads: the IO loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.demotion import Demotion
from cachemgr.tiers.fetching import PEER, TieredFetch

if TYPE_CHECKING:
    from cachemgr.cluster.node import ClusterNode  # a process without a cluster does without its code

log = logging.getLogger(__name__)


class _Opened(Protocol):
    async def forget(self, store: HostStore) -> None: ...

    async def close(self) -> None: ...


class Sources:
    """`open` it before the first store, `close` it after the last."""

    def __init__(
        self, node: "ClusterNode | None", tiers: Sequence[LowerTier], *, clock: Callable[[], float]
    ) -> None:
        self.node = node
        self._tiers = tuple(tiers)
        self._demotion = Demotion(self._tiers)
        self._fetching = TieredFetch(node, self._tiers, clock=clock, came=self._demotion.came)

    async def open(self) -> None:
        """Begin; what raises here leaves nothing behind."""
        opened: list[_Opened] = list(self._tiers)  # made; to be closed also if not started
        try:
            if self.node is not None:
                await self.node.open()
                opened.append(self.node)
            for tier in self._tiers:
                await tier.start()
        except BaseException:
            await _all([one.close() for one in opened])
            raise

    def take_in(self, store: HostStore) -> None:
        """A cache was opened."""
        if self.node is not None:
            self.node.take_in(store)

    async def fetch(
        self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float, block_s: float | None
    ) -> None:
        """Bring what is missing of a chain until `deadline`; `block_s`: what computing a block would take."""
        if self._tiers:
            await self._fetching.fetch(store, hashes, deadline=deadline, block_s=block_s)
        elif self.node is not None:
            await self.node.fetch(store, hashes, deadline=deadline)

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of a chain was committed in `store`."""
        if self.node is not None:
            self.node.offer(store, hashes, index)
        if self._tiers:
            self._demotion.offer(store, hashes, index)

    def used(self, store: HostStore, hashes: Sequence[BlockHash]) -> None:
        """A chain, from its front, was found in `store` and is used once more."""
        if self._tiers:
            self._demotion.used(store, hashes)

    async def forget(self, store: HostStore) -> None:
        """Nothing here uses `store` any more when this returns."""
        await self._fetching.forget(store)
        self._demotion.forget(store)  # what it was given last is offered before the tiers let go of it
        await _all([one.forget(store) for one in self._all_opened()])

    def counters(self) -> dict[str, dict[str, float]]:
        """By tier: totals (`…_total`) and gauges (every other name)."""
        figures = {PEER: self.node.counters()} if self.node is not None else {}
        if not self._tiers:
            return figures
        for tier in self._tiers:
            figures[tier.name] = {f"tier_{name}": value for name, value in tier.counters().items()}
        for part in (self._fetching.counters(), self._demotion.counters()):
            for name, values in part.items():
                figures.setdefault(name, {}).update(values)
        return figures

    def hot(self) -> dict[str, float]:
        """Segments that are read most here, in hex, and their reads per second."""
        return self.node.hot() if self.node is not None else {}

    async def close(self) -> None:
        """Let go of everything. Idempotent."""
        await self._fetching.close()
        self._demotion.close()
        await _all([one.close() for one in self._all_opened()])

    def _all_opened(self) -> "list[_Opened]":
        return [*self._tiers, self.node] if self.node is not None else [*self._tiers]


async def _all(works: Sequence[Awaitable[None]]) -> None:
    """Together: one that is slow or fails holds up no other. The first failure is raised, others logged."""
    failures = [
        outcome
        for outcome in await asyncio.gather(*works, return_exceptions=True)
        if isinstance(outcome, BaseException)
    ]
    for failure in failures[1:]:
        log.error("letting go of a tier failed", exc_info=failure)
    if failures:
        raise failures[0]
