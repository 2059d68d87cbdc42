"""One node of a cluster, as the process it lives in sees it: opened once, closed after the caches.

Every process of a node reads from and gives to other nodes (`outward`). One of them is the node: it holds the
node's lock, and listens (`listening`). The others look once a second whether the lock fell free: that is how
the process that replaces another in a reload, or comes back after a kill, takes over. Until then they follow
the rings that it keeps on disk.

Invariants
- Trouble with sockets, peers or membership is never an exception here once the node is open.
- After `close` no thread, task, socket or lock is left.

Threads: `tiers`, `counters` and `close` by any but the IO thread.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cachemgr.cluster.background import Background
from cachemgr.cluster.contract import HostStore
from cachemgr.cluster.fetch.reads import ClusterTiers
from cachemgr.cluster.io_thread import IoThread
from cachemgr.cluster.listening import Listening
from cachemgr.cluster.moves.replicator import CopiesObserver
from cachemgr.cluster.node_lock import NodeLock
from cachemgr.cluster.outward import Outward
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.errors import CacheError
from cachemgr.settings import CacheSettings

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_FIGURES_S = 0.25
_OPEN_S = 10.0
_CLOSE_S = 30.0


class ClusterNode:
    """Implements `Cluster` of cachemgr.joining."""

    def __init__(
        self, cache: CacheSettings, settings: ClusterSettings, *, copies: CopiesObserver | None = None
    ) -> None:
        """SettingsError for what cannot work here. `copies` hears which failure domains hold a block."""
        self._lock = NodeLock(Path(settings.state_dir))
        self._listening: Listening | None = None
        self._figures: dict[str, float] = {}
        self._doors: dict[HostStore, ClusterTiers] = {}
        self._past: dict[str, float] = {}
        """Totals of doors that are closed."""
        self._said: set[str] = set()
        self._closed = False
        self._io = IoThread("cache-io")
        try:
            self._io.call(partial(self._open, cache, settings, copies), limit_s=_OPEN_S)
        except BaseException:
            self._lock.release()
            self._io.close()
            raise

    def tiers(self, store: HostStore) -> ClusterTiers:
        """What is beyond this process, for one store."""
        door = ClusterTiers(
            store, loop=self._io.loop, fetch=self._fetch, offer=self._offer, forget=self._forget
        )
        self._io.call(partial(self._take_in, store, door), limit_s=_OPEN_S)
        return door

    def counters(self) -> dict[str, float]:
        """As of a moment ago."""
        return self._figures

    def close(self) -> None:
        """Leave the cluster. After the caches. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._io.call(self._close, limit_s=_CLOSE_S)
        except TimeoutError as error:
            log.error("the cluster node did not leave in time: %s", error)
        finally:
            self._lock.release()
            self._io.close()

    # Below: on the IO thread.

    async def _open(
        self, cache: CacheSettings, settings: ClusterSettings, copies: CopiesObserver | None
    ) -> None:
        self._out = Outward(cache, settings, lock=self._lock, copies=copies)
        self._watch = Background("node", self._look)
        self._count = Background("figures", self._note_figures)
        try:
            await self._listen()
        except BaseException:
            await self._out.close()
            raise
        self._watch.start()
        self._count.start()

    async def _look(self) -> float:
        if self._listening is None:
            self._out.follow_the_node()
            await self._listen()
        else:
            self._out.rings.save_again()
        return _LOOK_S

    async def _listen(self) -> None:
        """Become the node, if no other process is; what stands in the way is said once."""
        out = self._out
        try:
            if not self._lock.take():
                self._say(f"node {out.rings.node}: another process of it listens; this one asks only")
                return
        except OSError as error:
            self._say(f"node {out.rings.node} does not listen: {error}")
            return
        try:
            listening = Listening(out, spawn=self._io.spawn)
            await listening.open()
            self._listening = listening
            log.info("node %s of %s listens on %s", out.rings.node, out.cluster, out.settings.listen)
        except (CacheError, OSError) as error:
            self._say(f"node {out.rings.node} does not listen: {error}")
        finally:
            if self._listening is None:  # also if we are closed at this moment
                self._lock.release()

    async def _take_in(self, store: HostStore, door: ClusterTiers) -> None:
        self._out.stores[store.format_id] = store
        self._doors[store] = door

    async def _fetch(self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float) -> None:
        if self._out.rings.known:
            await self._out.fetcher.fetch(store, hashes, deadline=deadline)

    def _offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        if self._out.rings.known:
            self._out.replicator.offer(store, hashes, index)

    async def _forget(self, store: HostStore) -> None:
        if self._out.stores.get(store.format_id) is store:
            del self._out.stores[store.format_id]
        if self._listening is not None:
            await self._listening.forget(store)
        await self._out.forget(store)
        door = self._doors.pop(store, None)
        for name, value in door.counters().items() if door is not None else ():
            if name.endswith("_total"):
                self._past[name] = self._past.get(name, 0.0) + value

    async def _note_figures(self) -> float:
        figures = self._out.counters()
        if self._listening is not None:
            figures |= self._listening.counters()
        for counted in (self._past, *(door.counters() for door in self._doors.values())):
            for name, value in counted.items():
                figures[name] = figures.get(name, 0.0) + value
        self._figures = figures
        return _FIGURES_S

    async def _close(self) -> None:
        await self._watch.close()
        await self._count.close()
        if self._listening is not None:
            await self._listening.close()
        await self._note_figures()
        await self._out.close()

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.warning("%s", line)


def open_node(
    cache: CacheSettings, settings: ClusterSettings, *, copies: CopiesObserver | None = None
) -> ClusterNode:
    """The part that this process has of the cluster. SettingsError for settings that cannot work here."""
    return ClusterNode(cache, settings, copies=copies)
