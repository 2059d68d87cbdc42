"""What the step loop sees of all that is beyond: one door per block format, thread-safe, never waiting.

Invariants
- `done` is called exactly once per fetch: when it ended, was given up, found no room, or its loop is gone.
- At most `limit` fetches are under way; one more is done at once, which is a miss.
- What was committed or used and not taken by the IO thread yet is bounded, too; more is dropped, counted.

Threads: any, but `close` not on the IO thread, which it waits for.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore

log = logging.getLogger(__name__)

_CLOSE_S = 20.0
"""Longer than anything takes that is cancelled, and than a tier may take to write what waits."""


class BehindDoor(Protocol):
    """What there is beyond a store, on the loop."""

    async def fetch(
        self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float, block_s: float | None
    ) -> None:
        """Bring what is missing of a chain until `deadline`; `block_s`: what computing a block would take."""
        ...

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of a chain was committed in `store`."""
        ...

    def used(self, store: HostStore, hashes: Sequence[BlockHash]) -> None:
        """A chain, from its front, was found in `store` and is used once more."""
        ...

    async def forget(self, store: HostStore) -> None:
        """Nobody uses `store` any more when this returns."""
        ...


@dataclass(slots=True)
class DoorCounts:
    """Totals of one door."""

    refused_fetches: int = 0
    """Found too many under way."""
    failed_fetches: int = 0
    """Ended in an exception: our own bug."""
    dropped_offers: int = 0
    failed_offers: int = 0

    def totals(self) -> dict[str, float]:
        """Every total as `beyond_<what>_total`."""
        return {f"beyond_{name}_total": float(value) for name, value in asdict(self).items()}


class _Read:
    """A fetch under way. `task` is the IO thread's."""

    __slots__ = ("done", "task")

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.task: asyncio.Task[None] | None = None


class TiersDoor:
    """A `RemoteTiers` of one store. `beyond` is called on `loop`, which another thread runs."""

    active = True

    def __init__(
        self,
        store: HostStore,
        *,
        loop: asyncio.AbstractEventLoop,
        beyond: BehindDoor,
        limit: int = 256,
        offers: int = 4096,
    ) -> None:
        self._store = store
        self._loop = loop
        self._beyond = beyond
        self._limit = limit
        self._most_offers = offers
        self._counts = DoorCounts()
        self._lock = threading.Lock()
        self._reads: set[_Read] = set()
        self._offers: deque[tuple[Sequence[BlockHash], int | None]] = deque()
        """Chain and the block that was committed; None: the chain was used."""
        self._posted = False
        self._closed = False

    def fetch(
        self,
        hashes: Sequence[BlockHash],
        *,
        deadline: float,
        done: Callable[[], None],
        block_s: float | None = None,
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
        elif not self._post(partial(self._start, read, hashes, deadline, block_s)):
            self._end(read)
        return partial(self._give_up, read)

    def offer(self, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of the chain was committed here."""
        self._note(hashes, index)

    def used(self, hashes: Sequence[BlockHash]) -> None:
        """A chain was found here and is used once more."""
        self._note(hashes, None)

    def counters(self) -> dict[str, float]:
        """Totals, and how many fetches are under way."""
        return {**self._counts.totals(), "beyond_fetches_under_way": float(len(self._reads))}

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

    def _note(self, hashes: Sequence[BlockHash], index: int | None) -> None:
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

    def _start(
        self, read: _Read, hashes: Sequence[BlockHash], deadline: float, block_s: float | None
    ) -> None:
        if self._closed:
            self._end(read)
            return
        read.task = self._loop.create_task(self._run(hashes, deadline, block_s))
        read.task.add_done_callback(lambda task: self._end(read))

    async def _run(self, hashes: Sequence[BlockHash], deadline: float, block_s: float | None) -> None:
        try:
            await self._beyond.fetch(self._store, hashes, deadline=deadline, block_s=block_s)
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
                if index is None:
                    self._beyond.used(self._store, hashes)
                else:
                    self._beyond.offer(self._store, hashes, index)
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
        await self._beyond.forget(self._store)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _settle(ended: concurrent.futures.Future[None], task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("letting go of a store failed", exc_info=error)
    ended.set_result(None)
