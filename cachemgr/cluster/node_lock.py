"""Which process of a node is the node: it alone listens, and keeps the ring on disk.

A lock on a file beside the ring, held for life: it falls free with the process, however that ends.
"""

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path

from cachemgr.errors import SettingsError
from cachemgr.ring import KeptRings, RingFile

log = logging.getLogger(__name__)

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class NodeLock:
    """`take` it again and again; `release` it once."""

    def __init__(self, folder: Path) -> None:
        """SettingsError if `folder` cannot be made."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            problem = f"must be a folder that can be made ({error.strerror})"
            raise SettingsError("state_dir", problem, str(folder)) from None
        self._path = folder / "node.lock"
        self._fd = -1

    @property
    def held(self) -> bool:
        """True while this process is the node."""
        return self._fd >= 0

    def take(self) -> bool:
        """True if this process is the node now. OSError if the file cannot be opened."""
        if self.held:
            return True
        fd = os.open(self._path, _FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        """Let another process be the node. Idempotent. The file stays: deleting it could split the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


class NodeRingFile(RingFile):
    """The ring of a node on disk: any of its processes reads it, the one that is the node writes it."""

    def __init__(self, path: Path, lock: NodeLock) -> None:
        super().__init__(path)
        self._file = path
        self._lock = lock
        self._seen: tuple[int, int] | None = None

    def changed(self) -> bool:
        """True if there is one, and not that of the last time this was asked."""
        try:
            info = self._file.stat()
        except OSError:
            return False
        before, self._seen = self._seen, (info.st_ino, info.st_mtime_ns)
        return self._seen != before

    def save(self, rings: KeptRings) -> None:
        """See RingFile; nothing if another process is the node."""
        if self._lock.held:
            super().save(rings)
