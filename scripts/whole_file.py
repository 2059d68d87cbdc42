"""Writes files that others read: the whole new content under the name, or what was there before."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, data: bytes, *, mode: int = 0o644, like: os.stat_result | None = None) -> None:
    """Replace `path` by one rename, after the content is on disk; OSError leaves the old file alone.

    `like`: the owner and the mode that it gets, instead of our own and `mode`.
    """
    write_whole_parts(path, (data,), mode=mode, like=like)


def write_whole_parts(
    path: Path, parts: Iterable[bytes], *, mode: int = 0o644, like: os.stat_result | None = None
) -> None:
    """`write_whole` of content made on the way; what its making raises leaves the old file, too."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            if like is not None:
                os.fchown(handle, like.st_uid, like.st_gid)
                os.fchmod(handle, stat.S_IMODE(like.st_mode))
            file.writelines(parts)
            file.flush()
            os.fsync(handle)
        os.replace(scratch, path)
    except OSError as error:  # a failed write does not say where
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()
