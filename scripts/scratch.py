"""Makes a folder beside its final place, one process at a time, and removes what a failure left half made.

.<name>.lock     held while somebody works on <name>; the kernel lets go of it when he dies
.<name>.new/     in the making; the holder of the lock clears what a killed one left
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from scripts.errors import DiskError, RejectedError


@contextlib.contextmanager
def scratch_for(target: Path, *, work: str) -> Iterator[Path]:
    """An empty folder on the disk of `target` to make it in; it is gone afterwards, with what is still in it.

    RejectedError if another process is at `work` on `target`; DiskError if the disk refuses what is written.
    """
    lock, scratch = target.with_name(f".{target.name}.lock"), target.with_name(f".{target.name}.new")
    try:
        _make_folder(target.parent)
        with _held(lock, busy=f"another {work} of {target} is running: wait for it, then try again"):
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                scratch.mkdir()
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DiskError.of(error, doing=f"{work} of {target}") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def put_in_place(made: Path, target: Path, *, scratch: Path) -> None:
    """Rename `made` to `target`; a folder that is there moves to `scratch` first, and back if that fails."""
    old = scratch / f"old-{target.name}"
    if not target.exists():
        made.rename(target)
        return
    target.rename(old)
    try:
        made.rename(target)
    except OSError:
        old.rename(target)
        raise


@contextlib.contextmanager
def _held(lock: Path, *, busy: str) -> Iterator[None]:
    handle = _lock(lock)
    if handle is None:
        raise RejectedError(busy)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # while it is held: whoever opened it meanwhile sees that it lost its name
        os.close(handle)


def _lock(lock: Path) -> int | None:
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _names(lock, handle):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder finished between our two calls and took the name away


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
