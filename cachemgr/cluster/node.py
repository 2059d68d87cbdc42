"""One node of a cluster, as the process it lives in sees it: opened once, closed after the caches.

Every process of a node reads from and gives to other nodes (`outward`). One of them is the node: it holds the
node's lock, and listens (`listening`). The others look once a second whether the lock fell free: that is how
the process that replaces another in a reload, or comes back after a kill, takes over. Until then they follow
the rings that it keeps on disk.

Invariants
- Trouble with sockets, peers or membership is never an exception here once the node is open.
- After `close` no task, socket or lock is left.

Threads: the IO thread.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from cachemgr.cluster.background import Background
from cachemgr.cluster.contract import Spawn
from cachemgr.cluster.listening import Listening
from cachemgr.cluster.moves.replicator import CopiesObserver
from cachemgr.cluster.node_lock import NodeLock
from cachemgr.cluster.outward import Outward
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.errors import CacheError
from cachemgr.host_contract import HostStore
from cachemgr.settings import CacheSettings

log = logging.getLogger(__name__)

_LOOK_S = 1.0


class ClusterNode:
    """`open` it on the loop, `close` it there."""

    def __init__(
        self,
        cache: CacheSettings,
        settings: ClusterSettings,
        *,
        spawn: Spawn,
        copies: CopiesObserver | None = None,
    ) -> None:
        """SettingsError for what cannot work here. `copies` hears which failure domains hold a block."""
        self._lock = NodeLock(Path(settings.state_dir))
        self.out = Outward(cache, settings, lock=self._lock, copies=copies)
        self.listening: Listening | None = None
        """What only the process has that is the node."""
        self._spawn = spawn
        self._watch = Background("node", self._look)
        self._said: set[str] = set()

    async def open(self) -> None:
        """Take part; what raises here leaves nothing behind."""
        try:
            await self._listen()
        except BaseException:
            await self.out.close()
            self._lock.release()
            raise
        self._watch.start()

    def take_in(self, store: HostStore) -> None:
        """Blocks of this store are exchanged from now on."""
        self.out.stores[store.format_id] = store

    async def fetch(self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float) -> None:
        """Bring what is missing of a chain from other nodes until `deadline`."""
        if self.out.rings.known:
            await self.out.fetcher.fetch(store, hashes, deadline=deadline)

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of a chain was committed in `store`: its owners are to have it."""
        if self.out.rings.known:
            self.out.replicator.offer(store, hashes, index)

    async def forget(self, store: HostStore) -> None:
        """Nothing here uses `store` any more when this returns."""
        if self.out.stores.get(store.format_id) is store:
            del self.out.stores[store.format_id]
        if self.listening is not None:
            await self.listening.forget(store)
        await self.out.forget(store)

    def counters(self) -> dict[str, float]:
        """Totals (`cluster_…_total`) and gauges (every other name)."""
        figures = self.out.counters()
        if self.listening is not None:
            figures |= self.listening.counters()
        return figures

    def hot(self) -> dict[str, float]:
        """Segments by reads per second, as far as this process is the node."""
        return self.listening.hot() if self.listening is not None else {}

    async def close(self) -> None:
        """Leave the cluster."""
        try:
            await self._watch.close()
            if self.listening is not None:
                await self.listening.close()
            await self.out.close()
        finally:
            self._lock.release()

    async def _look(self) -> float:
        if self.listening is None:
            self.out.follow_the_node()
            await self._listen()
        else:
            self.out.rings.save_again()
        return _LOOK_S

    async def _listen(self) -> None:
        """Become the node, if no other process is; what stands in the way is said once."""
        out = self.out
        try:
            if not self._lock.take():
                self._say(f"node {out.rings.node}: another process of it listens; this one asks only")
                return
        except OSError as error:
            self._say(f"node {out.rings.node} does not listen: {error}")
            return
        try:
            listening = Listening(out, spawn=self._spawn)
            await listening.open()
            self.listening = listening
            log.info("node %s of %s listens on %s", out.rings.node, out.cluster, out.settings.listen)
        except (CacheError, OSError) as error:
            self._say(f"node {out.rings.node} does not listen: {error}")
        finally:
            if self.listening is None:  # also if we are closed at this moment
                self._lock.release()

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.warning("%s", line)
