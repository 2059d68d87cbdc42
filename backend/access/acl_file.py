"""Reads an acl file from disk: it must be one that nobody but its owner could have written."""

import os
import shlex
import stat
from pathlib import Path
from typing import Final

from backend.access.acl import Acl
from backend.access.acl_schema import parse_acl
from backend.errors import ConfigError

MAX_ACL_BYTES: Final = 1 << 20


def read_acl(path: Path) -> Acl:
    """What the file says; ConfigError names what is wrong with it. Links are followed."""
    return decode_acl(read_acl_bytes(path), path)


def decode_acl(content: bytes, path: Path) -> Acl:
    """What `content` says; an error names `path`."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected TOML in UTF-8, found another byte at {error.start}") from None
    return parse_acl(text, str(path))


def read_acl_bytes(path: Path) -> bytes:
    """The file as it is; ConfigError if others could have written it."""
    try:
        with open(path, "rb", opener=_open) as file:
            _check(path, os.fstat(file.fileno()))
            content = file.read(MAX_ACL_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: expected a readable acl file, found none: put it back, or make one with "
            "`tensorcache acl new-key`"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable acl file, found: {error.strerror}") from None
    if len(content) > MAX_ACL_BYTES:
        raise ConfigError(f"{path}: must be at most {MAX_ACL_BYTES} bytes, found more")
    return content


def _open(name: str, flags: int) -> int:
    """Without waiting for whoever writes into a pipe."""
    return os.open(name, flags | os.O_NONBLOCK)


def _check(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(f"{path}: must be a regular file, or a link to one")
    if info.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path}: must belong to this user (uid {os.geteuid()}) or root, "
            f"found uid {info.st_uid}: run chown"
        )
    if info.st_mode & 0o022:
        raise ConfigError(
            f"{path}: must be writable by nobody but its owner, found mode {stat.S_IMODE(info.st_mode):04o}: "
            f"run `chmod go-w {shlex.quote(str(path))}`"
        )
