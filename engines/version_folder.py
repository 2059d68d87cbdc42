"""The folder that a model serves from: who may change it, and how a change gets onto the disk.

<version>/releases/.lock     held while someone changes the folder; the kernel lets go of it when he dies
<version>/releases/.new-…    in the making, or on its way out; the next holder of the lock clears what a
                             killed one left
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engines.errors import ReleaseError

CURRENT = "current"
RELEASES = "releases"
_LOCK = ".lock"
_NEW = ".new-"


@contextmanager
def changing(version_dir: Path, *, lock_seconds: float) -> Iterator[None]:
    """Be the only one who changes `version_dir`, with nothing in the making before and after.

    ReleaseError if somebody else is at it for longer than `lock_seconds`, or if the disk refuses.
    """
    releases = version_dir / RELEASES
    try:
        releases.mkdir(parents=True, exist_ok=True)
        with _lock(releases / _LOCK, lock_seconds), _scratch_cleared(releases):
            yield
    except OSError as error:
        found = f"{error.strerror or error} ({error.filename or releases})"
        raise ReleaseError("publish", expected=f"to write to {version_dir}", found=found) from None


def scratch(releases: Path) -> Path:
    """A name for something in the making."""
    return releases / f"{_NEW}{secrets.token_hex(8)}"


def write_file(path: Path, data: memoryview, *, mode: int) -> None:
    """Create `path` and put its content on disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Put the names in `path` on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _scratch_cleared(releases: Path) -> Iterator[None]:
    """Nothing in the making before (the copy may need its room) and after, whether it succeeds or not."""
    _clear_leftovers(releases)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # what failed first is what to tell; the next holder of the lock clears
            _clear_leftovers(releases)
        raise
    _clear_leftovers(releases)


def _clear_leftovers(releases: Path) -> None:
    """Remove what killed publishers left. Only the holder of the lock may: nobody else is at work then."""
    for path in releases.glob(f"{_NEW}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def _lock(path: Path, seconds: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + seconds
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                raise ReleaseError(
                    "publish", expected=f"no other publisher for {seconds:g} s", found=f"{path} held"
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
