"""What one owner is still to be given: blocks in order, many a put, each asked for a bounded number of times.

Invariants
- One put to an owner is under way at a time; `answered` is called exactly once for each block that was added
  and not removed.
- No owner is asked more than `TRIES` times for a block.

Threads: the IO thread.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cachemgr.cluster.contract import Peers
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId
from cachemgr.shard import BlockAddress

TRIES = 4
"""How often an owner is asked to take a block before that is left to repair."""

_FIRST_PAUSE_S = 0.25
"""Before the second try; each further one waits four times as long: all of them outlast one open breaker."""

_PUT_NBYTES = 4 << 20
_PUT_BLOCKS = 64
"""What one put takes at most, but always one block."""


@dataclass(slots=True, eq=False)
class Copying:
    """A committed block on its way to its owners."""

    store: HostStore
    address: BlockAddress
    position: int
    domains: set[str] = field(default_factory=set)
    """Failure domains that hold it."""
    reached: set[NodeId] = field(default_factory=set)
    """Owners that acknowledged it."""
    given_up: set[NodeId] = field(default_factory=set)
    tries: dict[NodeId, int] = field(default_factory=dict)
    """Owners in whose lanes it waits → how often they refused it."""


Answered = Callable[[Copying, NodeId, bool], None]
"""Hears that an owner acknowledged a block, or was asked for the last time."""


class OwnerLane:
    """Blocks for one owner. The task that sends them lives while there are any."""

    def __init__(
        self, node: NodeId, peers: Peers, *, call_s: float, clock: Callable[[], float], answered: Answered
    ) -> None:
        self._node = node
        self._peers = peers
        self._call_s = call_s
        self._clock = clock
        self._answered = answered
        self._ready: deque[Copying] = deque()
        self._later: list[tuple[float, int, Copying]] = []
        """Refused ones by when to ask again: a heap; the number keeps their order."""
        self._number = itertools.count()
        self._sending: list[Copying] = []
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, block: Copying) -> None:
        """Give it to the owner after those that wait."""
        self._ready.append(block)
        self._added.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all(), name=f"replicate to {self._node}")

    def remove(self, block: Copying) -> None:
        """It is no longer for this owner; a put under way goes on, and `answered` may hear of it."""
        with contextlib.suppress(ValueError):
            self._ready.remove(block)
        self._later = [entry for entry in self._later if entry[2] is not block]
        heapq.heapify(self._later)

    def waiting(self) -> Iterator[Copying]:
        """All that was added and is not answered."""
        yield from (*self._sending, *self._ready, *(block for _, _, block in self._later))

    async def forget(self, store: HostStore) -> list[Copying]:
        """Drop the blocks of a store, and the put of them under way; which ones."""
        await self.close()
        kept: list[Copying] = []
        gone: list[Copying] = []
        for block in self.waiting():
            (gone if block.store is store else kept).append(block)
        self._sending, self._later = [], []
        self._ready.clear()
        for block in kept:
            self.add(block)
        return gone

    async def close(self) -> None:
        """Stop sending. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _send_all(self) -> None:
        while self._ready or self._later:
            self._take_due()
            if not self._ready:
                await self._wait_for_due()
                continue
            self._sending = self._next_put()
            taken = await self._put(self._sending)
            sent, self._sending = self._sending, []
            for block, there in zip(sent, taken, strict=True):
                if there:
                    self._answered(block, self._node, True)
                else:
                    self._refused(block)

    def _take_due(self) -> None:
        while self._later and self._later[0][0] <= self._clock():
            self._ready.append(heapq.heappop(self._later)[2])

    async def _wait_for_due(self) -> None:
        self._added.clear()
        with contextlib.suppress(TimeoutError):
            pause = max(self._later[0][0] - self._clock(), 0.001)
            async with asyncio.timeout(pause):
                await self._added.wait()

    def _next_put(self) -> list[Copying]:
        """Leading blocks of one store, as many as one put takes; all of them, if the owner is down anyway."""
        store = self._ready[0].store
        limit = max(1, min(_PUT_BLOCKS, _PUT_NBYTES // store.payload_nbytes))
        peer = self._peers.peer(self._node)
        if peer is None or not peer.usable:
            limit = len(self._ready)
        put: list[Copying] = []
        while self._ready and len(put) < limit and self._ready[0].store is store:
            put.append(self._ready.popleft())
        return put

    async def _put(self, blocks: list[Copying]) -> list[bool]:
        """Which of `blocks`, all of one store, the owner has now."""
        peer = self._peers.peer(self._node)
        if peer is None or not peer.usable:
            return [False] * len(blocks)
        names = [block.address.hash for block in blocks]
        return await peer.put(blocks[0].store, names, deadline=self._clock() + self._call_s)

    def _refused(self, block: Copying) -> None:
        if self._node not in block.tries:
            return  # a new ring took it out of this lane meanwhile
        block.tries[self._node] += 1
        tries = block.tries[self._node]
        if tries >= TRIES:
            self._answered(block, self._node, False)
            return
        due = self._clock() + _FIRST_PAUSE_S * 4 ** (tries - 1)
        heapq.heappush(self._later, (due, next(self._number), block))
