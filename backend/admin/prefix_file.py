"""One public prefix as a file: written once, whole, read by every process of the node that serves the model.

Invariants
- A file is there with all of its content or not at all; two that write one name do not replace each other.
- What others could have written, or what does not say what its place says, is no prefix.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from backend.printable import printable

MAX_PREFIX_TOKENS: Final = 131_072
MAX_FILE_BYTES: Final = 2 << 20
SUFFIX: Final = ".json"
NAME: Final = re.compile(r"[a-z0-9._-]{1,63}")
NAME_RULE: Final = "1 to 63 characters of a-z, 0-9, ., _ and -"

_SCRATCH_SUFFIX = ".new"
_LEFT_OVER_S = 600.0
"""No write takes so long: who began it was killed."""


class PrefixError(Exception):
    """The file is no prefix; one line says why."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    model: str
    name: str
    tokens: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]],
        msgspec.Meta(min_length=1, max_length=MAX_PREFIX_TOKENS),
    ]
    registered: Annotated[datetime, msgspec.Meta(tz=True)]
    by: Annotated[str, msgspec.Meta(max_length=63)]


@dataclass(frozen=True, slots=True, eq=False)
class PublicPrefix:
    """What an admin made public: `tokens` int64 [N], read-only. `by`: which principal did."""

    name: str
    tokens: npt.NDArray[np.int64]
    registered: datetime
    by: str


def encode_prefix(model: str, prefix: PublicPrefix) -> bytes:
    """The content of its file."""
    return msgspec.json.encode(
        _File(1, model, prefix.name, prefix.tokens.tolist(), prefix.registered, prefix.by)
    )


def decode_prefix(content: bytes, model: str, name: str) -> PublicPrefix:
    """The prefix that a file at the place of `name` holds. Raises PrefixError."""
    try:
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PrefixError(f"expected a public prefix of format 1, found: {printable(str(error))}") from None
    for field, said, expected in (("model", file.model, model), ("name", file.name, name)):
        if said != expected:
            raise PrefixError(f"{field}: expected {expected} in this place, found {printable(said)}")
    tokens = np.array(file.tokens, dtype=np.int64)
    tokens.setflags(write=False)
    return PublicPrefix(name, tokens, file.registered, file.by)


def read_prefix_bytes(path: Path) -> bytes:
    """The file as it is. Raises PrefixError, and FileNotFoundError where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        problem = "a symbolic link" if path.is_symlink() else error.strerror
        raise PrefixError(f"expected a readable file, found: {problem}") from None
    try:
        _check(os.fstat(fd))
        with os.fdopen(fd, "rb", closefd=False) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PrefixError(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(content) > MAX_FILE_BYTES:
        raise PrefixError(f"expected at most {MAX_FILE_BYTES} bytes, found more")
    return content


def _check(info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
        raise PrefixError("expected a regular file of this user or root")
    if info.st_mode & 0o022:
        mode = stat.S_IMODE(info.st_mode)
        raise PrefixError(f"expected a file that only its owner may write, found mode {mode:04o}")


def write_prefix_file(folder: Path, model: str, prefix: PublicPrefix) -> None:
    """Put it there. Raises FileExistsError if there is one of this name, OSError if it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    _remove_left_over(folder)
    path = folder / f"{prefix.name}{SUFFIX}"
    scratch = folder / f".{prefix.name}.{secrets.token_hex(8)}{_SCRATCH_SUFFIX}"
    try:
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(encode_prefix(model, prefix))
            file.flush()
            os.fsync(fd)
        os.link(scratch, path)  # and not a rename, which would replace another one
    except OSError as error:  # a failed write does not say where
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """What was put into or taken out of it outlives a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_left_over(folder: Path) -> None:
    """Files of writers that were killed."""
    for scratch in folder.glob(f".*{_SCRATCH_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - scratch.lstat().st_mtime > _LEFT_OVER_S:
                scratch.unlink()
