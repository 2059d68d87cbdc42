"""Page-locks memory that a cache tier holds, so that the GPU copies blocks to and from it at full speed.

It happens in the background, slice by slice: pinning touches every page, and may hold up the driver's other
callers for as long as one slice takes. Copies work before, during, and without it, only slower; so a failure
is a log line and nothing else.

Invariants
- A slice holds whole slots and whole pages: no copy may reach across the end of what was pinned at once.
- Memory is kept mapped while it is pinned: another mapping at its address would be taken for it.

Threads: `lock` and `unlock` from any; one thread of its own pins.
"""

import logging
import math
import mmap
import queue
import threading
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engines.cuda import Device, open_device
from engines.driver import HostPinning
from engines.errors import DeviceError

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_SLICE_BYTES = 64 << 20
_CLOSE_S = 10.0


class PageLocker(Protocol):
    """Pins memory for as long as it is told to."""

    def lock(self, memory: Bytes) -> None:
        """Begin to pin `memory`, contiguous [slots, slot bytes]: no copy will reach across two slots."""
        ...

    def unlock(self, memory: Bytes) -> None:
        """Undo `lock` of the same array, before its memory is unmapped. Unknown memory is fine."""
        ...

    def close(self) -> None:
        """Undo every `lock`. Idempotent."""
        ...


class NoPageLocker:
    """For engines that copy with the CPU."""

    def lock(self, memory: Bytes) -> None:
        """Nothing to do."""

    def unlock(self, memory: Bytes) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def open_page_locker(runtime: str, *, device: int) -> PageLocker:
    """What pins memory for engines of `runtime` on the GPU `device`. DeviceError."""
    return DevicePageLocker(open_device(device), HostPinning()) if runtime == "tensorrt" else NoPageLocker()


@dataclass(slots=True, eq=False)
class _Locked:
    memory: Bytes  # kept, and with it the mapping
    pinned: list[int] = field(default_factory=list)  # addresses of its slices
    dropped: bool = False  # said before `turn` is asked for, so that no slice more comes first
    turn: threading.Lock = field(default_factory=threading.Lock)  # to pin one slice, or to unpin all


class DevicePageLocker:
    """Pins for one GPU, on a thread of its own."""

    def __init__(self, device: Device, pinning: HostPinning) -> None:
        self._device = device
        self._pinning = pinning
        self._wanted: dict[int, _Locked] = {}  # by address
        self._closed = False
        self._table = threading.Lock()  # guards the two above
        self._queue: queue.SimpleQueue[_Locked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pin_queued, name="page-locker", daemon=True)
        self._thread.start()

    def lock(self, memory: Bytes) -> None:
        """See `PageLocker.lock`."""
        assert memory.ndim == 2, f"memory of shape {memory.shape}"
        assert memory.flags.c_contiguous, "memory with gaps"
        address = _address(memory)
        with self._table:
            if self._closed or not memory.nbytes or address in self._wanted:
                return
            locked = self._wanted[address] = _Locked(memory)
        self._queue.put(locked)

    def unlock(self, memory: Bytes) -> None:
        """See `PageLocker.unlock`; waits while one slice is pinned."""
        with self._table:
            locked = self._wanted.pop(_address(memory), None)
        if locked is not None:
            self._unpin(locked)

    def close(self) -> None:
        """See `PageLocker.close`."""
        with self._table:
            wanted, self._wanted = self._wanted, {}
            self._closed = True
        for locked in wanted.values():
            self._unpin(locked)
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _pin_queued(self) -> None:
        while (locked := self._queue.get()) is not None:
            try:
                self._pin(locked)
            except DeviceError as error:
                log.warning(
                    "arena not page-locked, copies to the GPU will be slower: pinned=%d of %d bytes: %s "
                    "(in a container: --ulimit memlock=-1)",
                    _pinned_bytes(locked), locked.memory.nbytes, error,
                )  # fmt: skip
            else:
                log.info("arena page-locked: bytes=%d", _pinned_bytes(locked))

    def _pin(self, locked: _Locked) -> None:
        for address, nbytes in slices(_address(locked.memory), *locked.memory.shape):
            if locked.dropped:
                return
            with locked.turn:
                if locked.dropped:
                    return
                with self._device.current():
                    self._pinning.register(address, nbytes)
                locked.pinned.append(address)

    def _unpin(self, locked: _Locked) -> None:
        locked.dropped = True
        try:
            with locked.turn, self._device.current():
                while locked.pinned:
                    self._pinning.unregister(locked.pinned.pop())
        except DeviceError as error:
            log.warning("arena left page-locked: %s", error)


def slices(address: int, slots: int, slot_nbytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of what is pinned at once: whole slots that begin on a page; all, where none do."""
    if address % mmap.PAGESIZE:
        return [(address, slots * slot_nbytes)]
    step = mmap.PAGESIZE // math.gcd(slot_nbytes, mmap.PAGESIZE)  # slots until one begins on a page again
    step *= max(1, _SLICE_BYTES // (step * slot_nbytes))
    return [
        (address + first * slot_nbytes, min(step, slots - first) * slot_nbytes)
        for first in range(0, slots, step)
    ]


def _pinned_bytes(locked: _Locked) -> int:
    pinned = set(locked.pinned)
    return sum(
        nbytes
        for address, nbytes in slices(_address(locked.memory), *locked.memory.shape)
        if address in pinned
    )


def _address(memory: Bytes) -> int:
    return int(memory.__array_interface__["data"][0])
