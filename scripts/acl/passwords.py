"""Passwords of Redis users: taken from a file or made, kept in a file, shown as a hash."""

import hashlib
import os
import secrets
import stat
from pathlib import Path

from scripts.errors import DiskError, UsageError

_NBYTES = 32
_LONGEST = 4096
"""No node takes a longer one."""


def hashed(password: str) -> str:
    """As `#…` in an ACL rule: who reads the rules does not learn the password."""
    return "#" + hashlib.sha256(password.encode()).hexdigest()


def password_in(path: Path) -> str:
    """The first line of a file that only we can read, as a node reads it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, encoding="utf-8", newline="\n") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077:
                raise UsageError(f"{path}: must be a regular file with mode 0600")
            password = file.readline(_LONGEST + 1).rstrip("\r\n")
    except OSError as error:
        raise DiskError.of(error, doing="reading a password") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: must begin with a line of UTF-8 text") from None
    if not password:
        raise UsageError(f"{path}: its first line must be a password, found nothing")
    if len(password.encode()) > _LONGEST:
        raise UsageError(f"{path}: a password must be at most {_LONGEST} bytes long")
    return password


def make_password(path: Path) -> str:
    """A new one, alone in a new file with mode 0600; a file that is there keeps its own."""
    if os.path.lexists(path):
        return password_in(path)
    password = secrets.token_urlsafe(_NBYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(password + "\n")
            file.flush()
            os.fsync(fd)
    except OSError as error:
        raise DiskError.of(error, doing="keeping a password") from None
    return password
