"""What lies in some arcs, handed out in parts: one look at the store serves all parts of a listing.

A listing is sorted as packed addresses are, and a cursor is a place in that order: should it be forgotten
between two parts, a fresh one goes on from the same place.

Invariants: never more than `MAX_KEPT` listings are remembered, none for longer than `KEPT_S`; a part holds at
most MAX_NAMES addresses. Threads: the IO thread; the look itself is made in `executor`.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Executor
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from cachemgr.cluster.control.packed import (
    ADDRESS_NBYTES,
    CURSOR_NBYTES,
    MAX_NAMES,
    pack_address,
    unpack_arcs,
)
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId

KEPT_S = 30.0
MAX_KEPT = 8

_Key = tuple[NodeId, bytes, bytes]


class Listings:
    """Listings under way, per asking node, store and arcs. `clock`: monotonic seconds."""

    def __init__(self, executor: Executor, *, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._clock = clock
        self._kept: dict[_Key, tuple[float, bytes]] = {}

    async def part(
        self, store: HostStore, *, asker: NodeId, low: bytes, high: bytes, after: bytes
    ) -> tuple[bytes, bytes]:
        """Packed addresses that come after the cursor, and the next cursor. MessageError for bad arcs."""
        arcs = unpack_arcs(low, high)
        key = (asker, store.format_id, blake2b(low + high, digest_size=16).digest())
        self._forget_old()
        listing = self._kept.get(key, (0.0, None))[1] if after else None
        if listing is None:
            loop = asyncio.get_running_loop()
            listing = await loop.run_in_executor(self._executor, _look, store, *arcs)
            self._kept[key] = (self._clock(), listing)
        start = _count_until(listing, after)
        part = listing[start * ADDRESS_NBYTES : (start + MAX_NAMES) * ADDRESS_NBYTES]
        if (start + MAX_NAMES) * ADDRESS_NBYTES >= len(listing):
            self._kept.pop(key, None)
            return part, b""
        return part, part[-ADDRESS_NBYTES:][:CURSOR_NBYTES]

    def _forget_old(self) -> None:
        now = self._clock()
        self._kept = {key: kept for key, kept in self._kept.items() if now - kept[0] < KEPT_S}
        for key in list(self._kept)[: max(0, len(self._kept) - MAX_KEPT + 1)]:
            del self._kept[key]


def _look(store: HostStore, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> bytes:
    return b"".join(sorted(map(pack_address, store.resident(low, high))))


def _count_until(listing: bytes, cursor: bytes) -> int:
    """How many addresses stand up to and with the cursor."""
    if not cursor:
        return 0
    starts = range(0, len(listing), ADDRESS_NBYTES)
    return bisect_right(starts, cursor, key=lambda start: listing[start : start + CURSOR_NBYTES])
