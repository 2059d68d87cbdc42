"""Copies leased blocks out of arenas and hands over those that passed their check: the end of the read path.

Invariants
- What other processes can write is never handed over: only private copies, checked as they are copied.
- A block that failed is rejected before its lease is let go, so that nobody writes its slot meanwhile.

Threads: the step loop.
"""

import logging
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

from cachemgr.arena import ArenaView
from cachemgr.contract import MemoryPins, Sink
from cachemgr.lease import SlotLease
from cachemgr.other_blocks import FIRST_OTHER_SLOT
from cachemgr.shard import ALIGN, BlockAddress, ShardOpener, Verdict, address_of

log = logging.getLogger(__name__)

_PIECE_NBYTES: Final = 256 << 10
"""What is copied and tagged at a time: fits the second-level cache, so that the tag reads no memory."""

_BATCH_NBYTES: Final = 1 << 20
"""Small blocks go to the sink together, up to this; a big one goes alone, still hot when imported."""


class CheckedCopies:
    """Private memory to copy to, and the checks."""

    def __init__(self, opener: ShardOpener, *, payload_nbytes: int, pins: MemoryPins) -> None:
        self._opener = opener
        self._payload_nbytes = payload_nbytes
        self._batch = max(1, _BATCH_NBYTES // payload_nbytes)
        self._pins = pins
        self._staging: list[npt.NDArray[np.uint8]] = []
        self._warned: set[str] = set()

    def restore(self, lease: SlotLease, *, first: int, sink: Sink) -> int:
        """Hand over blocks `first` … of a lease; how many from 0 are usable. See PrefixCache.restore."""
        staging = self._staging.pop() if self._staging else self._new_staging()
        usable = first
        while usable < lease.blocks:
            asked = range(usable, min(usable + self._batch, lease.blocks))
            passed = self._stage(lease, asked, staging)
            if passed:
                sink(range(usable, usable + passed), [staging[row] for row in range(passed)])
            usable += passed
            if passed < len(asked):
                self._remove_bad(lease, range(usable + 1, lease.blocks), scratch=staging[0])
                break
        self._staging.append(staging)
        return usable

    def warn_anew(self) -> None:
        """Arenas were replaced: what is said once of each may be said again."""
        self._warned.clear()

    def _stage(self, lease: SlotLease, blocks: range, staging: npt.NDArray[np.uint8]) -> int:
        """Copy and check `blocks` into rows of `staging`; how many leading ones passed.

        The one that did not is rejected.
        """
        for row, index in enumerate(blocks):
            if not self._passes(lease, index, staging[row]):
                return row
        return len(blocks)

    def _remove_bad(self, lease: SlotLease, blocks: range, *, scratch: npt.NDArray[np.uint8]) -> None:
        """Where one block was bad its neighbours may be: check the rest of the lease, hand over nothing.

        What is recomputed can then be committed whole; else every request would find, and heal, one block.
        Takes no longer than restoring the lease would have.
        """
        for index in blocks:
            self._passes(lease, index, scratch)

    def _passes(self, lease: SlotLease, index: int, out: npt.NDArray[np.uint8]) -> bool:
        """Copy block `index` of a lease to `out` and check it; False, and the block rejected, if it fails."""
        slot = lease.slots[index]
        arena = lease.tier.holder(slot)
        verdict = self._copy_checked(arena, slot, address_of(lease.hashes, index), out)
        if verdict is Verdict.WHOLE:
            return True
        lease.tier.table.reject(slot, lease.hashes[index], verdict)
        if arena is not None and arena.whole() and slot < FIRST_OTHER_SLOT:
            self._warn(verdict, arena.path)
        return False

    def _warn(self, verdict: Verdict, path: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            log.warning("block removed from use: %s in %s; more are only counted", verdict.value, path)

    def _copy_checked(
        self, arena: ArenaView | None, slot: int, address: BlockAddress, out: npt.NDArray[np.uint8]
    ) -> Verdict:
        if arena is None or not arena.whole():
            return Verdict.CORRUPT
        check = self._opener.begin(arena.header(slot), address)
        if isinstance(check, Verdict):
            return check
        source = arena.payload(slot)
        for start in range(0, len(source), _PIECE_NBYTES):
            piece = out[start : start + _PIECE_NBYTES]
            piece[:] = source[start : start + _PIECE_NBYTES]
            check.update(piece.data)
        return Verdict.WHOLE if check.passed() else Verdict.CORRUPT

    def _new_staging(self) -> npt.NDArray[np.uint8]:
        """Private memory for one batch, [batch, payload bytes]; every row starts at a multiple of 128.

        Pages of its own: they can be pinned without their neighbours.
        """
        stride = -(-self._payload_nbytes // ALIGN) * ALIGN
        memory = np.frombuffer(mmap.mmap(-1, self._batch * stride), np.uint8)
        rows = memory.reshape(self._batch, stride)
        self._pins.lock(rows)
        return rows[:, : self._payload_nbytes]
