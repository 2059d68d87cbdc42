"""The LowerTier over a folder of LMDB: threads of its own, so that a transaction holds up no read.

    loop            put → queue            known, get → a call with a deadline
    lmdb-writer     opening, batches, eviction, taking over       lmdb-reader     one call after another

Invariants
- The loop never touches a file: it looks into dictionaries, takes locks that are held for microseconds, and
  waits for the threads with a bound.
- A disk that gives nothing for `call_s` is not asked until the read that hangs has ended: `usable`.

Threads: the IO loop. Whether the process is another one after a fork is looked at by `usable`: nothing here
works on in a child.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence

from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress
from cachemgr.tiers.lmdb_tier.batch import Offer
from cachemgr.tiers.lmdb_tier.counts import LmdbCounts
from cachemgr.tiers.lmdb_tier.read_call import ReadCall
from cachemgr.tiers.lmdb_tier.reader import Reader
from cachemgr.tiers.lmdb_tier.record import keys_of
from cachemgr.tiers.lmdb_tier.settings import LmdbTierSettings
from cachemgr.tiers.lmdb_tier.shelf import LmdbShelf
from cachemgr.tiers.lmdb_tier.writer import Writer

log = logging.getLogger(__name__)


class LmdbTier:
    """See LowerTier. `clock`: monotonic seconds."""

    name = "lmdb"

    def __init__(self, settings: LmdbTierSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.admit_seen = settings.admit_seen
        self._settings = settings
        self._counts = LmdbCounts()
        self._shelf = LmdbShelf(settings, self._counts, clock=clock)
        self._reader = Reader(self._shelf, self._counts, stuck_s=settings.call_s, clock=clock)
        self._writer = Writer(self._shelf, settings, self._counts, clock=clock)
        self._clock = clock
        self._pid = os.getpid()
        self._running = False
        self._closed = False

    @property
    def usable(self) -> bool:
        """See LowerTier: its folder is open, and the disk gives what it is asked for."""
        return (
            self._running
            and self._shelf.database is not None
            and not self._reader.stuck
            and os.getpid() == self._pid
        )

    async def start(self) -> None:
        """See LowerTier. The folder is opened by the writer's thread, now or when it can be."""
        if not self._running and not self._closed:
            self._running = True
            self._reader.start()
            self._writer.start()

    async def known(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> int:
        """See LowerTier. Memory only in the process that writes; a look into the tree in others."""
        self._counts.known_calls += 1
        if not self.usable or not blocks:
            return 0
        if self._shelf.writes:
            key = keys_of(store.format_id)
            known = self._shelf.rows.leading(key(address.hash) for address in blocks)
        else:
            call = ReadCall(store, blocks, payload=False)
            known = await self._reader.run(call, deadline=deadline)
        self._counts.known_blocks += known
        return known

    async def get(
        self,
        store: HostStore,
        blocks: Sequence[BlockAddress],
        *,
        deadline: float,
        arrived: Callable[[int], None],
    ) -> None:
        """See LowerTier."""
        self._counts.get_calls += 1
        if self.usable and blocks:
            call = ReadCall(store, blocks, payload=True, arrived=arrived)
            await self._reader.run(call, deadline=deadline)

    def put(self, store: HostStore, blocks: Sequence[BlockAddress]) -> None:
        """See LowerTier. Of a process that does not write here, nothing is kept."""
        if not self._running or os.getpid() != self._pid:
            return
        if self._shelf.reads_only:
            self._counts.add(put_not_writer=len(blocks))
            return
        rows, key = self._shelf.rows, keys_of(store.format_id)
        offers = [Offer(store, address, key(address.hash)) for address in blocks]
        known = [offer.key for offer in offers if offer.key in rows]
        if known:
            self._counts.add(put_known=len(known))
            self._shelf.used(known)
        if len(known) < len(offers):
            self._writer.offer([offer for offer in offers if offer.key not in rows])

    async def forget(self, store: HostStore) -> None:
        """See LowerTier. Waits at most `close_s` each for a read and a transaction that use it."""
        limit_s = self._settings.close_s
        let_go = await self._reader.forget(store, limit_s=limit_s)
        let_go &= await self._writer.forget(store, limit_s=limit_s)
        if not let_go:
            log.error("lmdb: a store goes away while the disk holds up who uses it, for %g s", limit_s)

    def counters(self) -> dict[str, float]:
        """See LowerTier. Entries and bytes are known to the process that writes."""
        return {
            **self._counts.totals(),
            **self._shelf.gauges(),
            "queue_blocks": float(self._writer.waiting),
            "usable": float(self.usable),
        }

    async def close(self) -> None:
        """See LowerTier. At most `close_s` for reads, and for what waits to be written."""
        if not self._running:
            self._closed = True
            return
        self._running, self._closed = False, True
        limit_s = self._settings.close_s
        ended = await self._reader.close(limit_s=limit_s)
        ended &= await self._writer.close(limit_s=limit_s)
        if not ended:
            log.error("lmdb: the disk held up closing for more than %g s: left as it is", limit_s)
