"""What is asked of one peer in the same turn of the loop travels as one request.

A segment asks for its blocks alone; whoever else asks the same peer for the same store before the loop turns
is joined: a peer gets one request for all its segments of a prompt, and of prompts that came together.

Invariants
- A request ends by the latest deadline of its members, or when all of them left, whatever the peer does.
- A peer that lets twice `lookup_s` pass without a block on its way is not waited for any longer.

Threads: the IO loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cachemgr.cluster.contract import Fetched, Peer
from cachemgr.cluster.fetch.hot_keys import HotHints
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress

log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Times `lookup_s`. A call whose answer does not begin in time ends by itself, and its breaker hears of it;
this is for those that still wait for a connection."""


@dataclass(slots=True)
class GetCounts:
    """Totals of one node's requests to peers."""

    fetch_requests: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    silent_requests: int = 0
    """Cut off: nothing was on its way after `lookup_s`."""
    failed_requests: int = 0
    """Ended in an exception, which no peer should raise."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of the blocks that one member asked for."""

    arrived: frozenset[BlockHash]
    denied: bool
    """The peer answered: it does not have the others."""


_NOTHING = Answer(frozenset(), denied=False)


@dataclass(slots=True, eq=False)
class _Member:
    blocks: Sequence[BlockAddress]
    deadline: float
    answer: asyncio.Future[Answer]


@dataclass(slots=True, eq=False)
class _Get:
    peer: Peer
    store: HostStore
    members: list[_Member] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class JoinedGets:
    """The requests under way."""

    def __init__(
        self, *, hints: HotHints, settings: ClusterSettings, clock: Callable[[], float], counts: GetCounts
    ) -> None:
        self._hints = hints
        self._patience_s = settings.lookup_s * _PATIENCE
        self._clock = clock
        self._counts = counts
        self._gathering: dict[tuple[int, int], _Get] = {}
        self._going: dict[asyncio.Task[None], _Get] = {}

    async def get(
        self, peer: Peer, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float
    ) -> Answer:
        """Ask a peer for blocks of one segment. Cancelling it takes back this part of the request only."""
        key = id(peer), id(store)
        get = self._gathering.get(key)
        loop = asyncio.get_running_loop()
        if get is None:
            get = self._gathering[key] = _Get(peer, store)
            loop.call_soon(self._send, key)
        member = _Member(blocks, deadline, loop.create_future())
        get.members.append(member)
        try:
            return await member.answer
        finally:
            if get.task is not None and all(other.answer.done() for other in get.members):
                get.task.cancel()  # all have left; one that ended by itself does not mind

    async def forget(self, store: HostStore) -> None:
        """Nothing travels into `store` when this returns."""
        await self._end([task for task, get in self._going.items() if get.store is store])

    async def close(self) -> None:
        """End what is under way."""
        await self._end(list(self._going))

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _send(self, key: tuple[int, int]) -> None:
        get = self._gathering.pop(key)
        get.members = [member for member in get.members if not member.answer.done()]
        if get.members:
            get.task = asyncio.get_running_loop().create_task(self._run(get))
            self._going[get.task] = get
            get.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._going.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request to a peer failed", exc_info=error)

    async def _run(self, get: _Get) -> None:
        try:
            await self._answer(get)
        finally:
            for member in get.members:
                if not member.answer.done():
                    member.answer.set_result(_NOTHING)

    async def _answer(self, get: _Get) -> None:
        """Make the request and tell every member what came of its blocks."""
        # The beginning of a chain is worth more than what follows: it goes first.
        blocks = sorted((block for member in get.members for block in member.blocks), key=lambda b: b.index)
        deadline = max(member.deadline for member in get.members)
        self._counts.fetch_requests += 1
        began = self._clock()
        fetched = await self._fetched(get, blocks, deadline)
        if fetched is None:  # what came before that is in the store
            names = [block.hash for block in blocks]
            gone = set(get.store.missing(names))
            self._tell(get, frozenset(name for at, name in enumerate(names) if at not in gone), denied=False)
            return
        here = frozenset(
            block.hash for block, arrived in zip(blocks, fetched.arrived, strict=True) if arrived
        )
        self._counts.fetched_blocks += len(here)
        self._counts.fetched_bytes += fetched.nbytes
        asked = {block.segment for block in blocks}
        self._hints.note({segment: k for segment, k in dict(fetched.hot).items() if segment in asked})
        # A peer does not say whether it lacks the rest or was in trouble: so this is what trouble looks like.
        well = get.peer.usable and get.peer.down_since is None and self._clock() < deadline
        self._tell(get, here, denied=well and (bool(here) or self._clock() - began < self._patience_s))

    @staticmethod
    def _tell(get: _Get, here: frozenset[BlockHash], *, denied: bool) -> None:
        for member in get.members:
            if not member.answer.done():
                names = here.intersection(block.hash for block in member.blocks)
                member.answer.set_result(Answer(names, denied))

    async def _fetched(
        self, get: _Get, blocks: Sequence[BlockAddress], deadline: float
    ) -> Fetched | None:
        """What the peer brought; None if it was cut off or failed."""
        call = asyncio.ensure_future(get.peer.get(get.store, blocks, deadline=deadline))
        try:
            left = deadline - self._clock()
            done, _ = await asyncio.wait({call}, timeout=min(left, self._patience_s))
            if not done and left > self._patience_s:
                if len(get.store.missing([block.hash for block in blocks])) == len(blocks):
                    self._counts.silent_requests += 1
                    return None
                done, _ = await asyncio.wait({call}, timeout=deadline - self._clock())
            return call.result() if done and not call.cancelled() else None
        except Exception:
            self._counts.failed_requests += 1
            log.exception("peer %s: get raised", get.peer.node)
            return None
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait({call})
