"""What is where on this host: the arenas this process writes, those of others, and one table of their slots.

A tier is replaced as a whole when something that is no cache deletes or cuts an arena of ours: slot numbers
may then mean other bytes, so leases and reservations belong to one tier, and in a closed one they are misses.

Threads: `attach`, `refresh` and `close` by one; everything else by any.
"""

import logging
from collections.abc import Callable
from itertools import chain

import numpy as np
import numpy.typing as npt

from cachemgr.arena import Arena, ArenaView
from cachemgr.arena_files import ArenaFiles
from cachemgr.contract import BlockHash, MemoryPins
from cachemgr.counts import Counts
from cachemgr.other_arenas import OtherArenas
from cachemgr.other_blocks import FIRST_OTHER_SLOT
from cachemgr.shard import BlockAddress, ShardOpener, address_in
from cachemgr.slot_table import SlotTable

log = logging.getLogger(__name__)


class HostTier:
    """Starts empty: `attach` what `files` holds, `refresh` to see what others do."""

    def __init__(
        self,
        files: ArenaFiles,
        *,
        opener: ShardOpener,
        ttl_s: float,
        clock: Callable[[], float],
        counts: Counts,
        pins: MemoryPins,
    ) -> None:
        self._opener = opener
        self._pins = pins
        self._counts = counts
        self._arenas: tuple[Arena, ...] = ()
        self._taken_in: tuple[Arena, ...] = ()
        """Of `_arenas`: those whose every slot the table knows."""
        self.table = SlotTable(files.capacity, ttl_s=ttl_s, erase=self._erase, clock=clock, counts=counts)
        self._others = OtherArenas(files, opener=opener, table=self.table)

    def attach(self, arena: Arena) -> None:
        """Index what an arena holds, deepest and oldest first; useless slots are empty."""
        self._arenas = (*self._arenas, arena)
        self._pins.lock(arena.rows)
        first = arena.slots.start
        headers = arena.headers()
        readable, unreadable = self._opener.readable(headers), self._opener.unreadable(headers)
        corrupt = self._opener.published(headers) & ~readable & ~unreadable
        for slot in np.flatnonzero(corrupt).tolist():
            arena.invalidate(first + slot)
        self._counts.corrupt_blocks += int(corrupt.sum())
        rows = np.flatnonzero(readable)
        # Depth decides, then age: every block then has all its ancestors on its more recent side.
        rows = rows[np.lexsort((headers["sequence"][rows], -headers["index"][rows].astype(np.int64)))]
        names: list[BlockHash] = headers["hash"][rows].tolist()
        self.table.add_resident(names, (first + rows).astype(np.int32), headers["index"][rows])
        self.table.add_unreadable((first + np.flatnonzero(unreadable)).tolist())
        for run in _runs(~readable & ~unreadable):
            self.table.add_empty(range(first + run.start, first + run.stop))
        self._taken_in = (*self._taken_in, arena)
        log.info("host tier: %s: %d slots, %d blocks found", arena.path, len(arena.slots), len(names))

    def refresh(self, *, scan: bool) -> None:
        """See what other processes hold; `scan`: and what they published since."""
        self._others.refresh(scan=scan)

    def arena(self, slot: int) -> Arena | None:
        """The arena of ours that has this slot; None once the tier is closed."""
        return next((arena for arena in self._arenas if slot in arena.slots), None)

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Ours; none once the tier is closed."""
        return self._arenas

    def begin(self, slot: int, address: BlockAddress) -> Arena | None:
        """The arena of a slot that was just reserved, what it held before unpublished.

        None, and the slot given back, if the arena is lost.
        """
        arena = self.arena(slot)
        if arena is None or not arena.whole():
            self.table.cancel(address.hash)
            return None
        arena.invalidate(slot)
        return arena

    def holder(self, slot: int) -> ArenaView | None:
        """The arena of a leased slot, ours or another's; None if it is let go."""
        if slot < FIRST_OTHER_SLOT:
            return self.arena(slot)
        return next((view for view in self._others.views if slot in view.slots), None)

    def gauges(self) -> dict[str, float]:
        """Blocks, slots and bytes, now."""
        arenas = self._arenas
        return {
            **self.table.gauges(),
            "cache_arenas": float(len(arenas)),
            "cache_slots": float(sum(len(arena.slots) for arena in arenas)),
            "cache_bytes": float(sum(arena.nbytes for arena in arenas)),
            "cache_foreign_arenas": float(len(self._others.views)),
        }

    def check_integrity(self) -> None:
        """AssertionError if index, order, pins and arenas contradict each other; O(n)."""
        taken_in = chain.from_iterable(arena.slots for arena in self._taken_in)
        for name, slot in self.table.check_integrity(taken_in):
            arena = self.arena(slot)
            assert arena is not None, f"slot {slot} is in no arena"
            address = address_in(arena.header(slot))
            assert address is not None, f"slot {slot} is indexed and not published"
            assert address.hash == name, f"slot {slot} is published under another name"

    def close(self) -> None:
        """Forget everything; what is leased or reserved is so in name only. Our arenas stay open."""
        self.table.close()
        self._others.close()
        for arena in self._arenas:
            self._pins.unlock(arena.rows)
        self._taken_in = ()
        self._arenas = ()  # the table refers back to us: a map must not wait for the cycle to be collected

    def _erase(self, slot: int) -> None:
        """Unpublish a slot; nothing if the tier was closed meanwhile."""
        arena = self.arena(slot)
        if arena is not None:
            arena.invalidate(slot)


def _runs(mask: npt.NDArray[np.bool_]) -> list[range]:
    """The stretches of True in `mask`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    return [range(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
