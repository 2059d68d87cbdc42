"""All that is beyond this process's memory, opened once per process: other nodes, and the tiers below.

    TiersDoor (one per cache) ── IO thread ── Sources ──┬ peers     other nodes
                                                        ├ fetching  which block comes from where
                                                        └ demotion  which block is kept below

Invariants
- Trouble beyond is never an exception here once it is open.
- After `close` no thread, task, socket or lock is left.

Threads: `tiers`, `counters` and `close` by any but the IO thread.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cachemgr.cluster.background import Background
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.tiers.door import TiersDoor
from cachemgr.tiers.io_thread import IoThread
from cachemgr.tiers.sources import Sources

log = logging.getLogger(__name__)

_FIGURES_S = 0.25
_OPEN_S = 10.0
_CLOSE_S = 30.0


class OpenedBeyond:
    """Implements `Beyond` of cachemgr.joining, and BehindDoor. `make` is called on the IO thread."""

    def __init__(self, make: Callable[[IoThread], Sources]) -> None:
        """What `make` or opening what it made raises leaves nothing behind."""
        self._figures: dict[str, dict[str, float]] = {}
        self._hot: dict[str, float] = {}
        self._doors: dict[HostStore, TiersDoor] = {}
        self._past: dict[str, float] = {}
        """Totals of doors that are closed."""
        self._closed = False
        self._io = IoThread("cache-io")
        try:
            self._io.call(partial(self._open, make), limit_s=_OPEN_S)
        except BaseException:
            self._io.close()
            raise

    def tiers(self, store: HostStore) -> TiersDoor:
        """What is beyond this process, for one store."""
        door = TiersDoor(store, loop=self._io.loop, beyond=self)
        self._io.call(partial(self._take_in, store, door), limit_s=_OPEN_S)
        return door

    def counters(self) -> Mapping[str, Mapping[str, float]]:
        """By tier, as of a moment ago."""
        return self._figures

    def hot(self) -> Mapping[str, float]:
        """Segments that are read most, as of a moment ago."""
        return self._hot

    def close(self) -> None:
        """After the caches. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._io.call(self._close, limit_s=_CLOSE_S)
        except TimeoutError as error:
            log.error("what is beyond this process was not let go in time: %s", error)
        finally:
            self._io.close()

    # Below: on the IO thread.

    async def fetch(
        self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float, block_s: float | None
    ) -> None:
        """See BehindDoor."""
        await self.sources.fetch(store, hashes, deadline=deadline, block_s=block_s)

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        """See BehindDoor."""
        self.sources.offer(store, hashes, index)

    def used(self, store: HostStore, hashes: Sequence[BlockHash]) -> None:
        """See BehindDoor."""
        self.sources.used(store, hashes)

    async def forget(self, store: HostStore) -> None:
        """See BehindDoor."""
        await self.sources.forget(store)
        door = self._doors.pop(store, None)
        for name, value in door.counters().items() if door is not None else ():
            if name.endswith("_total"):
                self._past[name] = self._past.get(name, 0.0) + value

    async def _open(self, make: Callable[[IoThread], Sources]) -> None:
        self.sources = make(self._io)
        await self.sources.open()
        self._count = Background("figures", self._note_figures)
        self._count.start()

    async def _take_in(self, store: HostStore, door: TiersDoor) -> None:
        self.sources.take_in(store)
        self._doors[store] = door

    async def _note_figures(self) -> float:
        doors: dict[str, float] = {}
        for counted in (self._past, *(door.counters() for door in self._doors.values())):
            for name, value in counted.items():
                doors[name] = doors.get(name, 0.0) + value
        self._figures = {**self.sources.counters(), "": doors}
        self._hot = self.sources.hot()
        return _FIGURES_S

    async def _close(self) -> None:
        await self._count.close()
        await self._note_figures()
        await self.sources.close()
