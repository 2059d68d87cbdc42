"""An owner that a read found without a block is given it, in the background.

Whoever brought a block from a later candidate gives it to the owners of the ring in force that were asked
before and did not have it. That is a courtesy, and bounded as such: few blocks wait, the giver keeps to its
pace, and nobody is offered the same block again for a while.

Threads: the IO loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from cachemgr.cluster.contract import Peers
from cachemgr.cluster.moves.giver import Giver
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId
from cachemgr.shard import BlockAddress

log = logging.getLogger(__name__)

_MOST_WAITING = 1024
_MOST_RECENT = 4096
_AGAIN_S = 30.0
"""Before the same block is offered to the same owner again."""
_TOGETHER = 64
"""Blocks that are given to one node before the next one's turn."""


@dataclass(slots=True)
class RepairCounts:
    """Totals since the start of the node."""

    read_repaired_blocks: int = 0
    read_repair_refused: int = 0
    """The owner was down by then, or did not take it."""
    read_repair_dropped: int = 0
    """Found the queue full."""

    def totals(self) -> dict[str, float]:
        """Every total as `cluster_<what>_total`."""
        return {f"cluster_{name}_total": float(value) for name, value in asdict(self).items()}


class ReadRepair:
    """Its task lives while something waits. `giver`: one of its own, as its pace is."""

    def __init__(self, peers: Peers, giver: Giver, *, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._giver = giver
        self._clock = clock
        self._counts = RepairCounts()
        self._waiting: dict[tuple[NodeId, BlockHash], tuple[HostStore, BlockAddress]] = {}
        self._recent: dict[tuple[NodeId, BlockHash], float] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def give(self, store: HostStore, node: NodeId, blocks: Iterable[BlockAddress]) -> None:
        """`node` should have these blocks, which are in `store` now."""
        if self._closed:
            return
        now = self._clock()
        for block in blocks:
            key = node, block.hash
            if key in self._waiting or now < self._recent.get(key, now):
                continue
            if len(self._waiting) >= _MOST_WAITING:
                self._counts.read_repair_dropped += 1
                continue
            self._waiting[key] = store, block
        self._go_on()

    def counters(self) -> dict[str, float]:
        """Totals, and how many blocks wait."""
        return {**self._counts.totals(), "cluster_read_repair_queue": float(len(self._waiting))}

    async def forget(self, store: HostStore) -> None:
        """`store` goes away: nothing of it waits or travels when this returns."""
        self._waiting = {key: kept for key, kept in self._waiting.items() if kept[0] is not store}
        await self._stop()
        self._go_on()

    async def close(self) -> None:
        """Stop; what waits is not given. Idempotent."""
        self._closed = True
        self._waiting.clear()
        await self._stop()

    def _go_on(self) -> None:
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._give_all(), name="read repair")
            self._task.add_done_callback(_say)

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _give_all(self) -> None:
        while self._waiting:
            (node, _), (store, _) = next(iter(self._waiting.items()))
            blocks = self._next(node, store)
            peer = self._peers.peer(node)
            taken = 0
            if peer is not None and peer.usable:
                taken = sum(await self._giver.give(peer, store, blocks))
            self._counts.read_repaired_blocks += taken
            self._counts.read_repair_refused += len(blocks) - taken

    def _next(self, node: NodeId, store: HostStore) -> list[BlockAddress]:
        """Take what goes from this store to this node out of what waits, and remember it for a while."""
        keys = [key for key, (kept, _) in self._waiting.items() if key[0] == node and kept is store]
        until = self._clock() + _AGAIN_S
        blocks = []
        for key in keys[:_TOGETHER]:
            _, block = self._waiting.pop(key)
            blocks.append(block)
            self._recent.pop(key, None)
            self._recent[key] = until
        while len(self._recent) > _MOST_RECENT:
            del self._recent[next(iter(self._recent))]
        return blocks


def _say(task: asyncio.Task[None]) -> None:
    """An exception here is our own bug: said once, and the next repair begins anew."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("read repair failed", exc_info=error)
