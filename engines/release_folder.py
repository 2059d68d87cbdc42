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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from engines.errors import ReleaseError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Names of release files; no separators, so a release is one flat folder."""
MAX_FILES = 4096
_READ_BYTES = 1 << 20  # small enough to be hashed while still in the processor's cache
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class FileBytes:
    """One file as it was read: read-only bytes (64-byte aligned) and their SHA-256 in hex."""

    data: memoryview
    sha256: str


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
                    raise ReleaseError("folder", expected="regular files only", found=found)
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
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except OSError as error:
            raise ReleaseError("files", expected=f"a regular file {name}", found=_reason(error)) from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ReleaseError("files", expected=f"a regular file {name}", found=_kind(status.st_mode))
            if size is not None and status.st_size != size:
                raise ReleaseError(
                    "files", expected=f"{size} bytes in {name}", found=f"{status.st_size} bytes"
                )
            if limit is not None and status.st_size > limit:
                raise ReleaseError(
                    "files", expected=f"at most {limit} bytes in {name}", found=f"{status.st_size} bytes"
                )
            return _read_whole(fd, name, status.st_size)
        except OSError as error:
            raise ReleaseError("files", expected=f"{name} to be readable", found=_reason(error)) from None
        finally:
            os.close(fd)


def shown(value: str, limit: int = 80) -> str:
    """`value` for an error text: quoted, on one line, cut."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(value)} characters)"


def _read_whole(fd: int, name: str, size: int) -> FileBytes:
    room = np.empty(size + _ALIGN, np.uint8)  # one buffer, filled in place
    start = -room.ctypes.data % _ALIGN
    data = room.data[start : start + size]
    sha = hashlib.sha256()
    done = 0
    while done < size:
        count = os.readv(fd, [data[done : done + _READ_BYTES]])
        if count == 0:
            raise ReleaseError(
                "files", expected=f"{size} bytes in {name}", found=f"the end after {done} bytes"
            )
        sha.update(data[done : done + count])
        done += count
    if os.read(fd, 1):
        raise ReleaseError(
            "files", expected=f"{size} bytes in {name}", found="a file that grew while it was read"
        )
    return FileBytes(data.toreadonly(), sha.hexdigest())


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
