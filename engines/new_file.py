"""Write new files whole or not at all: a name appears only when the content behind it is on disk.

Invariant: whatever fails (a full disk, an interrupt), no file of the call is left, neither under its own
name nor under a temporary one.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class NewFile:
    """What to write where; `mode` is its permissions, from the first instant on."""

    path: Path
    data: bytes
    mode: int


def create_files(files: Sequence[NewFile]) -> None:
    """Create all of `files`, of one folder, or none of them. FileExistsError if a name is taken, OSError."""
    scratch: list[Path] = []
    named: list[Path] = []
    try:
        for file in files:
            scratch.append(_scratch(file.path))
            _write(scratch[-1], file)
        for temporary, file in zip(scratch, files, strict=True):
            _name(temporary, file.path)
            named.append(file.path)
        _sync_folder(files[0].path.parent)
    except BaseException:
        _remove(named)
        raise
    finally:
        _remove(scratch)


def replace_file(file: NewFile) -> None:
    """Write `file` in place of what has its name, which stays as it is if that fails with OSError."""
    scratch = _scratch(file.path)
    try:
        _write(scratch, file)
        os.replace(scratch, file.path)
        _sync_folder(file.path.parent)
    finally:
        _remove([scratch])


def _scratch(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}")


def _write(path: Path, file: NewFile) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, file.mode)
    with open(fd, "wb") as opened:
        opened.write(file.data)
        opened.flush()
        os.fsync(fd)


def _name(scratch: Path, path: Path) -> None:
    """A second name instead of a rename, because a rename would replace what has the name."""
    try:
        os.link(scratch, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # without hard links, only a writer in this very instant could be replaced
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(scratch, path)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
