"""An owner that a read found without a block is given it, in the background.

Whoever brought a block from a later candidate gives it to the owners of the ring in force that were asked
before and did not have it. That is a courtesy, and bounded as such: few blocks wait, bytes per second are
limited, and nobody is offered the same block again for a while.

Threads: the IO loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from cachemgr.cluster.background import Pace
from cachemgr.cluster.contract import HostStore, Peers
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId

log = logging.getLogger(__name__)

_MOST_WAITING = 1024
_MOST_RECENT = 4096
_AGAIN_S = 30.0
"""Before the same block is offered to the same owner again."""
_PUT_NBYTES = 4 << 20
_PUT_BLOCKS = 64


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
    """Its task lives while something waits."""

    def __init__(self, peers: Peers, *, settings: ClusterSettings, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._call_s = settings.call_s
        self._clock = clock
        self._pace = Pace(settings.copy_bytes_per_s, clock=clock)
        self._counts = RepairCounts()
        self._waiting: dict[tuple[NodeId, BlockHash], HostStore] = {}
        self._recent: dict[tuple[NodeId, BlockHash], float] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def give(self, store: HostStore, node: NodeId, names: Iterable[BlockHash]) -> None:
        """`node` should have these blocks, which are in `store` now."""
        if self._closed:
            return
        now = self._clock()
        for name in names:
            key = node, name
            if key in self._waiting or now < self._recent.get(key, now):
                continue
            if len(self._waiting) >= _MOST_WAITING:
                self._counts.read_repair_dropped += 1
                continue
            self._waiting[key] = store
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._give_all(), name="read repair")
            self._task.add_done_callback(_say)

    def counters(self) -> dict[str, float]:
        """Totals, and how many blocks wait."""
        return {**self._counts.totals(), "cluster_read_repair_queue": float(len(self._waiting))}

    async def forget(self, store: HostStore) -> None:
        """`store` goes away: nothing of it waits or travels when this returns."""
        self._waiting = {key: kept for key, kept in self._waiting.items() if kept is not store}
        await self._stop()
        if self._waiting and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._give_all(), name="read repair")
            self._task.add_done_callback(_say)

    async def close(self) -> None:
        """Stop; what waits is not given. Idempotent."""
        self._closed = True
        self._waiting.clear()
        await self._stop()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _give_all(self) -> None:
        while self._waiting:
            (node, _), store = next(iter(self._waiting.items()))
            names = self._next_put(node, store)
            taken = await self._put(node, store, names)
            self._counts.read_repaired_blocks += taken
            self._counts.read_repair_refused += len(names) - taken

    def _next_put(self, node: NodeId, store: HostStore) -> list[BlockHash]:
        """Take what goes to this node in one put out of what waits, and remember it for a while."""
        limit = max(1, min(_PUT_BLOCKS, _PUT_NBYTES // store.payload_nbytes))
        keys = [key for key, kept in self._waiting.items() if key[0] == node and kept is store][:limit]
        until = self._clock() + _AGAIN_S
        for key in keys:
            del self._waiting[key]
            self._recent.pop(key, None)
            self._recent[key] = until
        while len(self._recent) > _MOST_RECENT:
            del self._recent[next(iter(self._recent))]
        return [name for _, name in keys]

    async def _put(self, node: NodeId, store: HostStore, names: list[BlockHash]) -> int:
        peer = self._peers.peer(node)
        if peer is None or not peer.usable:
            return 0
        await self._pace.spend(len(names) * store.payload_nbytes)
        return sum(await peer.put(store, names, deadline=self._clock() + self._call_s))


def _say(task: asyncio.Task[None]) -> None:
    """An exception here is our own bug: said once, and the next repair begins anew."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("read repair failed", exc_info=error)
