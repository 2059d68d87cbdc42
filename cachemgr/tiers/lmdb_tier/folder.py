"""The folder on disk: who writes it, how it is opened, and how it is begun anew.

    writer.lock    held by the process that writes, for life; falls free with it, however that ends
    unsynced       "lazy" only: names the boot of the machine since which not all of it is known to be on disk
    blocks/        the LMDB environment

Invariants
- Files are emptied or opened under a lock on the folder itself, so nobody opens half of the old ones.
- A folder that this process may not write is read only while nobody writes it: a shared lock on writer.lock
  keeps every writer out meanwhile, because without its table of readers LMDB would reuse what is being read.

Threads: the tier's writer.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cachemgr.tiers.lmdb_tier.errors import LmdbTrouble

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class TierFolder:
    """`take` it again and again; `release` it once. Every OSError is a LmdbTrouble."""

    def __init__(self, path: Path, *, boot_id: Path = _BOOT_ID) -> None:
        self.path = path
        self.blocks = path / "blocks"
        self._boot_id = boot_id
        self._lock = -1
        self.writes = False
        """This process holds writer.lock."""
        self.frozen = False
        """This process may only read, and keeps writers out."""

    def take(self) -> bool:
        """True if this process writes here now; False if another does, or nobody may: see `frozen`."""
        if self.writes or self.frozen:
            return self.writes
        with _trouble(f"{self.path}"):
            self._make()
            self._lock, writable = self._open_lock()
            how = fcntl.LOCK_EX if writable else fcntl.LOCK_SH
            try:
                fcntl.flock(self._lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                if not writable:
                    raise LmdbTrouble(f"{self.path} is written by a process of another user") from None
                return False
        self.writes, self.frozen = writable, not writable
        return writable

    def release(self) -> None:
        """Let another process write. Idempotent. The file stays: deleting it could split the lock."""
        fd, self._lock = self._lock, -1
        self.writes = self.frozen = False
        if fd >= 0:
            with suppress(OSError):  # on close Linux frees the number all the same
                os.close(fd)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Nobody empties it meanwhile."""
        with self._folder_lock(fcntl.LOCK_SH):
            yield

    def begin_anew(self) -> None:
        """Delete what is kept. Whoever has it open reads on in the deleted files until he looks again."""
        with _trouble(f"{self.path}"), self._folder_lock(fcntl.LOCK_EX):
            self._remove_gone()  # first: in a container every process may have the same number
            if self.blocks.exists():
                self.blocks.rename(self.path / f"gone-{os.getpid()}")
            self._remove_gone()
            self._marker.unlink(missing_ok=True)

    def finish_beginning_anew(self) -> None:
        """Delete what a process left that was killed while it began anew."""
        if any(self._gone()):
            with _trouble(f"{self.path}"), self._folder_lock(fcntl.LOCK_EX):
                self._remove_gone()

    def data_nbytes(self) -> int:
        """Size of the file of blocks; 0 if there is none."""
        return self._data().st_size if self._exists() else 0

    def data_inode(self) -> int:
        """Which file it is; 0 if there is none."""
        return self._data().st_ino if self._exists() else 0

    def whole(self) -> bool:
        """False if this machine has been started anew since somebody wrote without telling the disk."""
        with _trouble(f"{self._marker}"):
            try:
                return self._marker.read_text() == self._boot_id.read_text()
            except FileNotFoundError:
                return True

    def mark_unsynced(self) -> None:
        """From now on the disk is not told."""
        with _trouble(f"{self._marker}"):
            self._marker.write_text(self._boot_id.read_text())
            fd = os.open(self._marker, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self._sync_folder()

    def mark_synced(self) -> None:
        """All of it is on disk."""
        with _trouble(f"{self._marker}"):
            self._marker.unlink(missing_ok=True)

    @property
    def _marker(self) -> Path:
        return self.path / "unsynced"

    def _gone(self) -> Iterator[Path]:
        return self.path.glob("gone-*")

    def _remove_gone(self) -> None:
        for left in self._gone():
            shutil.rmtree(left)

    def _make(self) -> None:
        if not self.path.is_dir():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _open_lock(self) -> tuple[int, bool]:
        """The file of the lock, and whether this process may write here."""
        lock = self.path / "writer.lock"
        if os.access(self.path, os.W_OK | os.X_OK):
            with suppress(PermissionError):
                return os.open(lock, _FLAGS | os.O_RDWR | os.O_CREAT, 0o600), True
        return os.open(lock, _FLAGS | os.O_RDONLY), False

    @contextmanager
    def _folder_lock(self, how: int) -> Iterator[None]:
        with _trouble(f"{self.path}"):
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _trouble(f"{self.path}: being opened or emptied by another process"):
                fcntl.flock(fd, how | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)

    def _sync_folder(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _exists(self) -> bool:
        return (self.blocks / "data.mdb").exists()

    def _data(self) -> os.stat_result:
        with _trouble(f"{self.blocks}"):
            return os.stat(self.blocks / "data.mdb")


@contextmanager
def _trouble(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LmdbTrouble(f"{what}: {error.strerror or error}") from error
