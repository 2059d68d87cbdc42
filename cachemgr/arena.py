"""One arena: a shared-memory file of fixed, 128-aligned slots that outlives the process writing it.

There is one writer, which holds an exclusive flock for life; whoever gets the lock next finds the slots as
they were. Other processes map the file read-only meanwhile; each holds a shared range lock as long as it
does, and only who gets that lock exclusively changes the file's size, because touching a page that a file
lost is a SIGBUS. A slot is published by writing its header's magic last and invalidated by erasing the magic
first, so a writer killed at any moment leaves a slot that is whole, empty, or refused by its tag.

Invariants: slot i starts at i × slot_nbytes, a multiple of 128; every byte of the file is backed by memory
(posix_fallocate), because a write into an unbacked page of a full tmpfs kills the process.

No promise: another process of the same user (or root) can truncate the file in spite of all locks. Every
use asks for the file's size first (`whole`), so a truncation between two uses is a miss; one that falls into
a copy, microseconds long, ends this process by SIGBUS, which Python cannot catch, and the next process makes
good what it finds. Reading by `pread` would survive, and would make a restore half as slow again (copy and
tag of a block of 1.4 MB: 113 µs mapped, 173 read); deleting the file, the usual mistake, ends no process.
Either is noticed within a second or so, and the arena replaced by a fresh one.

Threads: slots are disjoint; the cache sees to it that one slot has one writer.
"""

import fcntl
import mmap
import os
import stat
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockFormat
from cachemgr.shard import HEADER_DTYPE, HEADER_NBYTES, MAGIC, MAGIC_OFFSET, slot_nbytes

_MAGIC_END = MAGIC_OFFSET + len(MAGIC)
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN_FLAGS = os.O_RDWR | _SAFE_FLAGS
_RANGE_LOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, pid; all zeros but the type mean the whole file."""


class ArenaView:
    """A mapped arena file to read from. Slots are numbered `first_slot` … `first_slot + slots − 1`.

    It is unmapped when its last user drops it, never under a reader.
    """

    def __init__(
        self, fd: int, *, path: str, block_format: BlockFormat, first_slot: int, writable: bool = False
    ) -> None:
        self.path = path
        self.payload_nbytes = block_format.payload_nbytes
        self.slot_nbytes = slot_nbytes(self.payload_nbytes)
        info = os.fstat(fd)
        self.file_id = (info.st_dev, info.st_ino)
        self.slots = range(first_slot, first_slot + info.st_size // self.slot_nbytes)
        self._mapped = len(self.slots) * self.slot_nbytes
        # The map keeps a duplicate of the descriptor, and with it the locks of its open file.
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, self._mapped, access=access)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._whole = True

    @property
    def nbytes(self) -> int:
        """Bytes of the file that hold slots."""
        return self._mapped

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """View of all slots, [slots, slot bytes]."""
        return self._bytes.reshape(-1, self.slot_nbytes)

    def offset(self, slot: int) -> int:
        """Bytes from the start of the file to the slot's header."""
        return self._start(slot)

    def payload(self, slot: int) -> npt.NDArray[np.uint8]:
        """View of a slot's payload, writable if the arena is ours; empty once it is closed."""
        start = self._start(slot) + HEADER_NBYTES
        return self._bytes[start : start + self.payload_nbytes]

    def header(self, slot: int) -> bytes:
        """A private copy of a slot's header; empty once the arena is closed."""
        start = self._start(slot)
        return self._bytes[start : start + HEADER_NBYTES].tobytes()

    def headers(self) -> npt.NDArray[Any]:
        """A private copy of every header, HEADER_DTYPE [slots]; none once the arena is closed."""
        mapped = self._bytes  # a reference that keeps the map from closing
        slots = len(mapped) // self.slot_nbytes
        return np.ndarray(slots, HEADER_DTYPE, mapped, strides=(self.slot_nbytes,)).copy()

    def whole(self) -> bool:
        """False once somebody truncated the file: touching the lost part would be a SIGBUS.

        Asked before each use.
        """
        try:
            if self._whole and self._map.size() < self._mapped:
                self._whole = False
        except (ValueError, OSError):  # another thread unmaps it at this moment
            return False
        return self._whole

    def _start(self, slot: int) -> int:
        return (slot - self.slots.start) * self.slot_nbytes


class Arena(ArenaView):
    """An arena whose writer we are: open, locked, mapped."""

    def __init__(self, fd: int, *, path: str, block_format: BlockFormat, first_slot: int) -> None:
        super().__init__(fd, path=path, block_format=block_format, first_slot=first_slot, writable=True)
        self._fd = fd

    def invalidate(self, slot: int) -> None:
        """Unpublish a slot: nobody takes it for a shard any more."""
        mapped = self._bytes  # a reference that keeps the map from closing
        if len(mapped) and self.whole():
            start = self._start(slot)
            mapped[start + MAGIC_OFFSET : start + _MAGIC_END] = 0

    def publish(self, slot: int, header: bytes) -> None:
        """Write the header behind a written payload, its magic last (x86 keeps the order of stores).

        Nothing once the arena is closed.
        """
        mapped = self._bytes  # a reference that keeps the map from closing
        if not len(mapped):
            return
        start = self._start(slot)
        source = np.frombuffer(header, np.uint8)
        mapped[start : start + MAGIC_OFFSET] = source[:MAGIC_OFFSET]
        mapped[start + _MAGIC_END : start + HEADER_NBYTES] = source[_MAGIC_END:]
        mapped[start + HEADER_NBYTES + self.payload_nbytes : start + self.slot_nbytes] = 0
        mapped[start + MAGIC_OFFSET : start + _MAGIC_END] = source[MAGIC_OFFSET:_MAGIC_END]

    def damage(self) -> str | None:
        """What somebody did to the file meanwhile that makes it useless: "deleted", "cut", or None.

        A deleted one could be used on, but no other process would ever find what is in it.
        """
        if os.fstat(self._fd).st_nlink == 0:
            return "deleted"
        return None if self.whole() else "cut"

    def let_go(self) -> None:
        """Unlock a damaged file. Nobody uses it from now on; who reads it at this moment unmaps it."""
        self._whole = False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        """Unmap and unlock; the file stays. Views still held keep the mapping, not the lock. Idempotent."""
        if self._fd < 0:
            return
        # mmap keeps a duplicate of the descriptor: closing ours alone would not unlock while a view lives.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._bytes = np.zeros(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            self._whole = False  # a reservation outlives the cache; its view unmaps when it goes
        os.close(self._fd)
        self._fd = -1


def open_locked(path: str) -> int | None:
    """Open and lock an arena file of this user; None if it is locked by another process or gone.

    OSError if it cannot be an arena: a symbolic link, not a regular file, of another owner, a mode other
    than 0600, or known under a second name.
    """
    fd = _open_checked(path, _OPEN_FLAGS)
    return None if fd is None else _lock(fd)


def open_to_read(path: str) -> int | None:
    """Open an arena file of this user, its size fixed as long as the descriptor or a map of it lives.

    None if it is gone or its size is about to change. OSError as `open_locked`.
    """
    fd = _open_checked(path, os.O_RDONLY | _SAFE_FLAGS)
    if fd is not None and not _lock_size(fd, fcntl.F_RDLCK):
        os.close(fd)
        return None
    return fd


def may_resize(fd: int) -> bool:
    """True if nobody else has the file mapped; nobody can map it then until `resized`."""
    return _lock_size(fd, fcntl.F_WRLCK)


def resized(fd: int) -> None:
    """The size will not change any more: readers may map the file."""
    _lock_size(fd, fcntl.F_UNLCK)


def create_locked(path: str) -> int | None:
    """Create and lock a new, empty arena file; None if the name is taken."""
    try:
        fd = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    os.fchmod(fd, 0o600)  # whatever the umask
    return _lock(fd)


def _lock(fd: int) -> int | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if os.fstat(fd).st_nlink == 0:  # deleted between our open and our lock
        os.close(fd)
        return None
    return fd


def _open_checked(path: str, flags: int) -> int | None:
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise PermissionError(f"expected a regular file of user {os.geteuid()}, found user {info.st_uid}")
        if stat.S_IMODE(info.st_mode) != 0o600:
            raise PermissionError(f"expected mode 0600, found {stat.S_IMODE(info.st_mode):04o}")
        if info.st_nlink > 1:
            raise PermissionError(f"expected one name, found {info.st_nlink}")
    except PermissionError:
        os.close(fd)
        raise
    return fd


def _lock_size(fd: int, kind: int) -> bool:
    """A range lock of the open file (not of the process), independent of the writer's flock."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _RANGE_LOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: held by another
        return False
    return True
