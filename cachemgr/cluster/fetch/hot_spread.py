"""Gives a hot segment to its extra owners, before anybody is told that they have it.

Threads: the IO loop; the search for the segment's blocks runs in another thread.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cachemgr.cluster.contract import Peers
from cachemgr.cluster.moves.giver import Giver
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, position_of
from cachemgr.shard import BlockAddress


class HotSpread:
    """A `hot_keys.Spread`. `stores`: those of this node, now; `giver`: one of its own, as its pace is."""

    def __init__(self, stores: Callable[[], Iterable[HostStore]], peers: Peers, giver: Giver) -> None:
        self._stores = stores
        self._peers = peers
        self._giver = giver
        self._giving: dict[asyncio.Task[int | None], HostStore] = {}

    async def __call__(self, segment: BlockHash, nodes: tuple[NodeId, ...]) -> int:
        """Give them the segment; how many, from the first, have all of it now."""
        for store in list(self._stores()):
            task = asyncio.get_running_loop().create_task(self._give_all(store, segment, nodes))
            self._giving[task] = store
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                del self._giving[task]
            took = None if task.cancelled() else task.result()
            if took is not None:
                return took
        return 0

    async def forget(self, store: HostStore) -> None:
        """`store` goes away: nothing of it travels when this returns."""
        tasks = [task for task, given in self._giving.items() if given is store]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _give_all(
        self, store: HostStore, segment: BlockHash, nodes: tuple[NodeId, ...]
    ) -> int | None:
        """None if the store has nothing of it: then it is another format's."""
        blocks = await asyncio.to_thread(_blocks_of, store, segment)
        if not blocks:
            return None
        gave = await asyncio.gather(*(self._give(store, blocks, node) for node in nodes))
        return [*gave, False].index(False)

    async def _give(self, store: HostStore, blocks: Sequence[BlockAddress], node: NodeId) -> bool:
        peer = self._peers.peer(node)
        if peer is None or not peer.usable:
            return False
        return all(await self._giver.give(peer, store, blocks))


def _blocks_of(store: HostStore, segment: BlockHash) -> list[BlockAddress]:
    position = np.array([position_of(segment)], np.uint64)
    found = [block for block in store.resident(position, position) if block.segment == segment]
    return sorted(found, key=lambda block: block.index)
