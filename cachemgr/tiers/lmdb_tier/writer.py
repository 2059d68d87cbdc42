"""What waits to be written, and the thread that writes it: in batches, one transaction each.

    loop     offer → queue (bounded; drops are counted)
    thread   500 of them, 64 MiB, or 1 s after the first → one transaction; between two: whatever is due

Invariants
- What waits is named, not pinned: what left the host tier before its turn is passed by.
- No store is used once `forget` has returned True.

Threads: the loop, but for `_run` and what it calls.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.tiers.lmdb_tier.batch import Batches, Offer
from cachemgr.tiers.lmdb_tier.counts import LmdbCounts
from cachemgr.tiers.lmdb_tier.ending import Ending, joined
from cachemgr.tiers.lmdb_tier.errors import LmdbTrouble
from cachemgr.tiers.lmdb_tier.settings import LmdbTierSettings
from cachemgr.tiers.lmdb_tier.shelf import LmdbShelf

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often it is looked whether the lock fell free, the disk works again, blocks were found wrong."""


class Writer:
    """`start` it once, `close` it once."""

    def __init__(
        self,
        shelf: LmdbShelf,
        settings: LmdbTierSettings,
        counts: LmdbCounts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batches = Batches(
            shelf, counts, batch_nbytes=settings.batch_bytes, retry_s=settings.retry_s, clock=clock
        )
        self._shelf = shelf
        self._settings = settings
        self._counts = counts
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Offer] = deque()
        self._keys: set[BlockHash] = set()
        self._nbytes = 0
        self._since = 0.0
        """When the first of those that wait came."""
        self._using: list[HostStore] = []
        self._awaiting: list[Ending] = []
        """Of who waits for those to be let go."""
        self._hurried: list[Ending] = []
        """Of who waits for the queue to be empty."""
        self._over: Ending | None = None
        self._closing_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="lmdb-writer", daemon=True)

    @property
    def waiting(self) -> int:
        """Blocks in the queue."""
        return len(self._waiting)

    def start(self) -> None:
        """Open the folder, as soon as it can be, and write. On the loop."""
        self._over = Ending()
        self._thread.start()

    def offer(self, offers: Sequence[Offer]) -> None:
        """Have these written; never waits."""
        with self._changed:
            for offer in offers:
                if offer.key in self._keys:
                    continue
                if len(self._waiting) >= self._settings.queue_blocks or self._closing_by is not None:
                    self._counts.add(put_dropped=1)
                    continue
                if not self._waiting:
                    self._since = self._clock()
                    self._changed.notify_all()
                self._waiting.append(offer)
                self._keys.add(offer.key)
                self._nbytes += offer.store.payload_nbytes
            if self._full():
                self._changed.notify_all()

    async def forget(self, store: HostStore, *, limit_s: float) -> bool:
        """Write what waits of `store` within half of `limit_s`, or drop it; False if it is still in use."""
        await self._hurry(store, limit_s / 2)
        with self._changed:
            kept = [offer for offer in self._waiting if offer.store is not store]
            self._counts.add(put_dropped=len(self._waiting) - len(kept))
            self._set_waiting(kept)
            if not any(one is store for one in self._using):
                return True
            released = Ending()
            self._awaiting.append(released)
        return await released.wait(limit_s)

    async def close(self, *, limit_s: float) -> bool:
        """Write what waits, close the files, end the thread; False if the disk holds it. Idempotent."""
        with self._changed:
            if self._closing_by is None:
                self._closing_by = self._clock() + limit_s
            self._changed.notify_all()
        return self._over is None or (await self._over.wait(limit_s) and joined(self._thread))

    async def _hurry(self, store: HostStore, limit_s: float) -> None:
        """Have what waits written now, if any of it is of `store`."""
        written = Ending()
        with self._changed:
            if not self._shelf.may_write or not any(offer.store is store for offer in self._waiting):
                return
            self._hurried.append(written)
            self._changed.notify_all()
        await written.wait(limit_s)
        with self._changed:
            if written in self._hurried:
                self._hurried.remove(written)

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
        finally:
            with self._changed:
                self._counts.add(put_dropped=len(self._waiting))
                self._set_waiting(())
            self._shelf.close()
            assert self._over is not None
            self._over.reach()

    def _turn(self) -> bool:
        """One look, and one batch if it is due; True at the end."""
        self._guarded(self._shelf.look)
        with self._changed:
            if self._shelf.reads_only:  # what came before that was known
                self._counts.add(put_not_writer=len(self._waiting))
                self._set_waiting(())
            if not self._due():
                self._changed.wait(self._pause())
            offers = self._take() if self._ready() else []
            self._using = [offer.store for offer in offers]
            closing = self._closing_by
            done = closing is not None and (not self._waiting or self._clock() >= closing)
        if self._shelf.may_write:
            self._guarded(lambda: self._write(offers))
        return done or (closing is not None and not self._shelf.may_write)

    def _write(self, offers: Sequence[Offer]) -> None:
        try:
            self.batches.write(offers, released=self._released)
        except LmdbTrouble as error:
            self._shelf.write_failed(error)
        finally:
            self._written()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Our own bugs end a step, not the thread."""
        try:
            step()
        except Exception:
            self._counts.add(failed_calls=1)
            log.exception("writing blocks failed")
            self._released()

    def _released(self) -> None:
        with self._changed:
            self._using = []
            awaiting, self._awaiting = self._awaiting, []
        for released in awaiting:
            released.reach()

    def _written(self) -> None:
        """A batch is on the disk, or never will be."""
        with self._changed:
            hurried = [] if self._waiting and self._shelf.may_write else self._hurried
            self._hurried = [one for one in self._hurried if one not in hurried]
        for written in hurried:
            written.reach()

    def _full(self) -> bool:
        return len(self._waiting) >= self._settings.batch_writes or self._nbytes >= self.batches.batch_nbytes

    def _due(self) -> bool:
        hurried = bool(self._hurried and self._waiting)
        return self._closing_by is not None or ((hurried or self._full()) and self._shelf.may_write)

    def _ready(self) -> bool:
        """True if what waits is written now."""
        if not self._waiting or not self._shelf.may_write:
            return False
        return self._due() or self._clock() >= self._since + self._settings.batch_s

    def _pause(self) -> float:
        if self._waiting and self._shelf.may_write:
            return max(0.0, min(_LOOK_S, self._since + self._settings.batch_s - self._clock()))
        return min(_LOOK_S, self._settings.retry_s)

    def _take(self) -> list[Offer]:
        """The first of what waits, as much as a transaction takes."""
        offers: list[Offer] = []
        nbytes = 0
        while self._waiting and len(offers) < self._settings.batch_writes:
            nbytes += self._waiting[0].store.payload_nbytes
            if offers and nbytes > self.batches.batch_nbytes:
                break
            offers.append(self._waiting.popleft())
        self._keys -= {offer.key for offer in offers}
        self._nbytes -= sum(offer.store.payload_nbytes for offer in offers)
        return offers

    def _set_waiting(self, offers: Sequence[Offer]) -> None:
        self._waiting = deque(offers)
        self._keys = {offer.key for offer in offers}
        self._nbytes = sum(offer.store.payload_nbytes for offer in offers)
