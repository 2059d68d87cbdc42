"""What the step loop sees of the cluster: one door per block format, thread-safe, and never waiting.

Invariants
- `done` is called exactly once per fetch: when it ended, was given up, found no room, or its loop is gone.
- At most `limit` fetches are under way; one more is done at once, which is a miss.
- Committed blocks that the IO thread has not taken yet are bounded, too; more are dropped and counted.

Threads: any, but `close` not on the IO thread, which it waits for.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from cachemgr.cluster.contract import HostStore
from cachemgr.contract import BlockHash

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
"""Longer than anything takes that is cancelled."""


class Fetch(Protocol):
    """Fetcher.fetch."""

    async def __call__(self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float) -> None:
        """Bring what is missing of a chain until `deadline`."""
        ...


Offer = Callable[[HostStore, Sequence[BlockHash], int], None]
"""Replicator.offer: block `index` of a chain was committed in a store."""

Forget = Callable[[HostStore], Awaitable[None]]
"""Nobody of the cluster uses a store any more when this returns."""


@dataclass(slots=True)
class TierCounts:
    """Totals of one door."""

    refused_fetches: int = 0
    """Found too many under way."""
    failed_fetches: int = 0
    """Ended in an exception: our own bug."""
    dropped_offers: int = 0
    failed_offers: int = 0

    def totals(self) -> dict[str, float]:
        """Every total as `cluster_<what>_total`."""
        return {f"cluster_{name}_total": float(value) for name, value in asdict(self).items()}


class _Read:
    """A fetch under way. `task` is the IO thread's."""

    __slots__ = ("done", "task")

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.task: asyncio.Task[None] | None = None


class ClusterTiers:
    """A `RemoteTiers` of one store. The functions are called on `loop`, which another thread runs."""

    active = True

    def __init__(
        self,
        store: HostStore,
        *,
        loop: asyncio.AbstractEventLoop,
        fetch: Fetch,
        offer: Offer,
        forget: Forget,
        limit: int = 256,
        offers: int = 4096,
    ) -> None:
        self._store = store
        self._loop = loop
        self._fetch = fetch
        self._offer = offer
        self._forget = forget
        self._limit = limit
        self._most_offers = offers
        self._counts = TierCounts()
        self._lock = threading.Lock()
        self._reads: set[_Read] = set()
        self._offers: deque[tuple[Sequence[BlockHash], int]] = deque()
        self._posted = False
        self._closed = False

    def fetch(
        self, hashes: Sequence[BlockHash], *, deadline: float, done: Callable[[], None]
    ) -> Callable[[], None]:
        """Bring what is missing of the chain until `deadline`; what is returned gives up interest."""
        read = _Read(done)
        with self._lock:
            room = not self._closed and len(self._reads) < self._limit
            if room:
                self._reads.add(read)
            elif not self._closed:
                self._counts.refused_fetches += 1
        if not room:
            done()
        elif not self._post(partial(self._start, read, hashes, deadline)):
            self._end(read)
        return partial(self._give_up, read)

    def offer(self, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of the chain was committed here."""
        with self._lock:
            if self._closed:
                return
            if len(self._offers) >= self._most_offers:
                self._counts.dropped_offers += 1
                return
            self._offers.append((hashes, index))
            post, self._posted = not self._posted, True
        if post:  # one turn of the loop takes all that came meanwhile
            self._post(self._pass_on)

    def counters(self) -> dict[str, float]:
        """Totals, and how many fetches are under way."""
        return {**self._counts.totals(), "cluster_fetches_under_way": float(len(self._reads))}

    def close(self) -> None:
        """End all fetches; nobody uses the store when this returns. Idempotent."""
        if _running_loop() is self._loop:
            raise RuntimeError("the IO thread would wait for itself: close from another one")
        with self._lock:
            self._closed = True
            self._offers.clear()
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            if self._loop.is_running() and self._post(lambda: self._shut(ended)):
                ended.result(timeout=_CLOSE_S)
        except TimeoutError:
            log.error("a store goes away while the IO thread may use it: no answer for %g s", _CLOSE_S)
        finally:
            for read in list(self._reads):
                self._end(read)

    def _post(self, call: Callable[[], None]) -> bool:
        """Have the IO thread call it; False if there is none any more."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True

    def _end(self, read: _Read) -> None:
        with self._lock:
            if read not in self._reads:
                return
            self._reads.discard(read)
        try:
            read.done()
        except Exception:
            log.exception("what was to be called after a fetch raised")

    def _give_up(self, read: _Read) -> None:
        if read in self._reads and not self._post(partial(self._cancel, read)):
            self._end(read)

    # On the IO thread.

    def _start(self, read: _Read, hashes: Sequence[BlockHash], deadline: float) -> None:
        if self._closed:
            self._end(read)
            return
        read.task = self._loop.create_task(self._run(hashes, deadline))
        read.task.add_done_callback(lambda task: self._end(read))

    async def _run(self, hashes: Sequence[BlockHash], deadline: float) -> None:
        try:
            await self._fetch(self._store, hashes, deadline=deadline)
        except Exception:
            self._counts.failed_fetches += 1
            log.exception("a fetch failed")

    def _cancel(self, read: _Read) -> None:
        if read.task is not None:
            read.task.cancel()

    def _pass_on(self) -> None:
        with self._lock:
            offers, self._offers = self._offers, deque()
            self._posted = False
        for hashes, index in offers:
            try:
                self._offer(self._store, hashes, index)
            except Exception:
                self._counts.failed_offers += 1
                log.exception("offering a block failed")

    def _shut(self, ended: concurrent.futures.Future[None]) -> None:
        task = self._loop.create_task(self._leave())
        task.add_done_callback(lambda done: _settle(ended, done))

    async def _leave(self) -> None:
        tasks = [read.task for read in list(self._reads) if read.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._forget(self._store)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _settle(ended: concurrent.futures.Future[None], task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("letting go of a store failed", exc_info=error)
    ended.set_result(None)
