"""A release folder as the load chain sees it: every file opened once, read once, and hashed as it is read.

Invariants
- Everything is opened relative to an open folder and never through a link: a name cannot be turned into
  another place between a check and its use.
- The bytes handed out are the bytes that were hashed. They lie in private memory (not a mapping of the file),
  so nobody can change them afterwards.
- Only regular files; anything else (link, folder, FIFO, device, socket) is refused without being read.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np

from engines.errors import ReleaseError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Names of release files; no separators, so a release is one flat folder."""
MAX_FILES = 4096
_READ_BYTES = 1 << 20  # small enough to be hashed while still in the processor's cache
_ALIGN = 64

OnPiece = Callable[[int], None]
"""Hears how many more bytes were read."""


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What tells cheaply that a file is another than before, or was written to."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """From what the system says."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.mtime_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self.size} bytes, written {when}.{self.mtime_ns % 10**9:09d}Z, inode {self.inode}"


@dataclass(frozen=True, slots=True)
class FileBytes:
    """One file as it was read: read-only bytes (64-byte aligned), their SHA-256, and its status before."""

    data: memoryview
    sha256: str
    status: FileStatus


class ReleaseFolder:
    """An open folder. Use `open`/`folder` as context managers; the descriptor is closed on the way out."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, follow: bool = False) -> Iterator[Self]:
        """Open `path`; `follow` allows its last component to be a link (an operator's own path)."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        try:
            fd = os.open(path, flags)
        except (OSError, ValueError) as error:
            raise ReleaseError("folder", expected=f"a folder at {path}", found=_reason(error)) from None
        try:
            yield cls(fd, path)
        finally:
            os.close(fd)

    @contextmanager
    def folder(self, name: str) -> Iterator["ReleaseFolder"]:
        """Open the folder `name` inside this one, not through a link."""
        path = self.path / name
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
        except (OSError, ValueError) as error:
            raise ReleaseError("folder", expected=f"a folder at {path}", found=_reason(error)) from None
        try:
            yield ReleaseFolder(fd, path)
        finally:
            os.close(fd)

    def files(self) -> frozenset[str]:
        """Names in the folder; ReleaseError for anything that is not a plainly named regular file."""
        with os.scandir(self._fd) as entries:
            names = []
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    found = f"{_kind(entry.stat(follow_symlinks=False).st_mode)} {shown(entry.name)}"
                    raise ReleaseError("folder", expected=f"regular files only in {self.path}", found=found)
                if not NAME.fullmatch(entry.name):
                    found = f"a file named {shown(entry.name)} (remove it)"
                    raise ReleaseError(
                        "folder", expected="file names of letters, digits and . _ -", found=found
                    )
                names.append(entry.name)
                if len(names) > MAX_FILES:
                    raise ReleaseError("folder", expected=f"at most {MAX_FILES} files", found="more")
        return frozenset(names)

    def read(self, name: str, *, size: int | None = None, limit: int | None = None) -> FileBytes:
        """Read `name` whole: exactly `size` bytes, or at most `limit`; ReleaseError if it has others."""
        with self._opened(name, size=size, limit=limit) as (fd, status):
            room = np.empty(status.size + _ALIGN, np.uint8)  # one buffer, filled in place
            start = -room.ctypes.data % _ALIGN
            data = room.data[start : start + status.size]
            pieces = (data[done : done + _READ_BYTES] for done in range(0, status.size, _READ_BYTES))
            sha256 = _read_into(fd, name, pieces, on_piece=None)
            return FileBytes(data.toreadonly(), sha256, status)

    def hash(self, name: str, *, size: int, on_piece: OnPiece) -> tuple[str, FileStatus]:
        """SHA-256 of `name`, which has `size` bytes, piece by piece through one small buffer.

        `on_piece` hears the bytes of every piece once it was hashed, and may take its time.
        """
        with self._opened(name, size=size, limit=None) as (fd, status):
            buffer = memoryview(bytearray(min(size, _READ_BYTES)))
            pieces = (buffer[: size - done] for done in range(0, size, _READ_BYTES))
            return _read_into(fd, name, pieces, on_piece=on_piece), status

    def status(self, name: str) -> FileStatus:
        """Size, time and inode of `name`, without opening it."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError as error:
            raise ReleaseError("files", expected=f"a regular file {name}", found=_reason(error)) from None
        if not stat.S_ISREG(status.st_mode):
            raise ReleaseError("files", expected=f"a regular file {name}", found=_kind(status.st_mode))
        return FileStatus.of(status)

    def names(self) -> frozenset[str]:
        """Names of whatever is in the folder; at most one more than MAX_FILES."""
        with os.scandir(self._fd) as entries:
            return frozenset(entry.name for entry in islice(entries, MAX_FILES + 1))

    def subfolders(self) -> frozenset[str]:
        """Names of the real folders in this one."""
        with os.scandir(self._fd) as entries:
            return frozenset(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    @contextmanager
    def _opened(self, name: str, *, size: int | None, limit: int | None) -> Iterator[tuple[int, FileStatus]]:
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except OSError as error:
            raise ReleaseError("files", expected=f"a regular file {name}", found=_reason(error)) from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ReleaseError("files", expected=f"a regular file {name}", found=_kind(status.st_mode))
            found = f"{status.st_size} bytes"
            if size is not None and status.st_size != size:
                raise ReleaseError("files", expected=f"{size} bytes in {name}", found=found)
            if limit is not None and status.st_size > limit:
                raise ReleaseError("files", expected=f"at most {limit} bytes in {name}", found=found)
            yield fd, FileStatus.of(status)
        except OSError as error:
            raise ReleaseError("files", expected=f"{name} to be readable", found=_reason(error)) from None
        finally:
            os.close(fd)


def shown(value: str, limit: int = 80) -> str:
    """`value` for an error text: quoted, on one line, cut."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(value)} characters)"


def _read_into(fd: int, name: str, pieces: Iterable[memoryview], *, on_piece: OnPiece | None) -> str:
    """Fill `pieces` one after the other, hashing each while it is hot; the file must end with the last."""
    sha = hashlib.sha256()
    done = 0
    for piece in pieces:
        filled = 0
        while filled < len(piece):
            count = os.readv(fd, [piece[filled:]])
            if count == 0:
                raise ReleaseError(
                    "files", expected=f"all bytes of {name}", found=f"the end after {done + filled} bytes"
                )
            filled += count
        sha.update(piece)
        done += len(piece)
        if on_piece is not None:
            on_piece(len(piece))
    if os.read(fd, 1):
        raise ReleaseError(
            "files", expected=f"{done} bytes in {name}", found="a file that grew while it was read"
        )
    return sha.hexdigest()


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "the symlink",
        stat.S_IFDIR: "the folder",
        stat.S_IFIFO: "the FIFO",
        stat.S_IFSOCK: "the socket",
        stat.S_IFREG: "the file",
    }
    return kinds.get(stat.S_IFMT(mode), "the device")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        if error.errno == errno.ELOOP:
            return "a symlink"
        if error.errno == errno.ENOTDIR:
            return "something that is not a folder (a symlink is none)"
        return error.strerror or str(error)
    return str(error)
