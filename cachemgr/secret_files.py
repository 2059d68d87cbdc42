"""Files of secrets: each 32 random bytes in hex that nobody else reads, read strictly and written whole.

A folder holds `naming.key` and `tag-<key_id>.key`. Their mode is 0600, or 0640 (0440) where one group that
the settings name may read them; none is writable by others than its owner, who is this user or root.

Invariants
- No secret appears in an error text.
- A file has its name only once it is whole and on disk; a file that has a name is never replaced.
"""

import contextlib
import errno
import grp
import os
import re
import secrets as random_source
import shlex
import stat
from pathlib import Path

from cachemgr.errors import SecretsError

SECRET_NBYTES = 32
NAMING_FILE = "naming.key"
MAX_KEY_ID = 2**32 - 1
ANY_GROUP = -1
"""For those who look after the files and use no secret: it is not their business which group may read."""
_TAG_FILE = re.compile(r"tag-(0|[1-9][0-9]{0,9})\.key")
_CONTENT = re.compile(rb"([0-9A-Fa-f]{%d})(\r?\n)?" % (2 * SECRET_NBYTES))
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def group_id(name: str) -> int | None:
    """The gid of the group that may read secrets; None for "", nobody. SecretsError for an unknown one."""
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise SecretsError(
            f"secret_group: this machine has no group {name!r}: create it, or name another one"
        ) from None


def tag_files(directory: Path) -> dict[int, Path]:
    """The files of tag secrets by key id, in order. SecretsError for no folder, or an id that is too high."""
    try:
        found = [(_TAG_FILE.fullmatch(path.name), path) for path in directory.iterdir()]
    except OSError as error:
        raise SecretsError(f"{directory}: cannot be listed ({error.strerror})") from None
    files = dict(sorted((int(match[1]), path) for match, path in found if match))
    if files and max(files) > MAX_KEY_ID:
        raise SecretsError(f"{files[max(files)]}: a key id must be at most {MAX_KEY_ID}: rename or remove it")
    return files


def tag_file(directory: Path, key_id: int) -> Path:
    """The name of the file that `tag_files` finds under this key id."""
    return directory / f"tag-{key_id}.key"


def make_directory(directory: Path, *, gid: int | None = None) -> None:
    """One that the group `gid` may look into, or nobody; one that is there stays as it is."""
    try:
        if not directory.is_dir():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _open_to(directory, gid, mode=0o750)
    except OSError as error:
        raise SecretsError(f"{directory}: cannot be created ({error.strerror})") from None
    check_directory(directory)


def check_directory(directory: Path) -> None:
    """SecretsError for one in which others could put files of theirs."""
    try:
        info = directory.stat()
    except OSError as error:
        raise SecretsError(f"{directory}: cannot be read ({error.strerror})") from None
    if not stat.S_ISDIR(info.st_mode):
        raise SecretsError(f"{directory}: expected a directory")
    if info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022:
        raise SecretsError(
            f"{directory}: must belong to this user and be writable by no one else: "
            f"run `chmod go-w {shlex.quote(str(directory))}`, with chown if its owner is another one"
        )


def read_secret(path: Path, *, gid: int | None = None) -> tuple[bytes, os.stat_result]:
    """The secret and what the file was when it was read; SecretsError if others may have seen or written it.

    `gid`: the group that may read it, too; None for nobody, or ANY_GROUP.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SecretsError(f"{path}: cannot be opened ({error.strerror})") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
            raise SecretsError(f"{path}: must be a regular file of this user")
        _check_mode(path, info, gid)
        try:
            text = file.read(2 * SECRET_NBYTES + 3)
        except OSError as error:
            raise SecretsError(f"{path}: cannot be read ({error.strerror})") from None
    match = _CONTENT.fullmatch(text)
    if match is None:
        found = f"{info.st_size} bytes of something else" if info.st_size else "an empty file"
        raise SecretsError(
            f"{path}: expected {SECRET_NBYTES} bytes in hex, found {found}: restore the file, or delete it "
            f"and make a new one with `tensorcache secret new {path.parent}`"
        )
    return bytes.fromhex(match[1].decode()), info


def create_secret(path: Path, *, gid: int | None = None) -> None:
    """A fresh secret under its name, whole and on disk, or no file at all (a disk may be full)."""
    scratch = path.with_name(f".{path.name}.{random_source.token_hex(8)}")
    try:
        try:
            fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(random_source.token_hex(SECRET_NBYTES) + "\n")
                file.flush()
                _open_to(fd, gid, mode=0o640)
                os.fsync(fd)
            _name(scratch, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                scratch.unlink()
        _sync_directory(path.parent)
    except OSError as error:
        raise SecretsError(f"{path}: cannot be created ({error.strerror})") from None


def _check_mode(path: Path, info: os.stat_result, gid: int | None) -> None:
    mode, quoted = stat.S_IMODE(info.st_mode), shlex.quote(str(path))
    if gid is None:
        if mode & 0o077:
            raise SecretsError(
                f"{path}: expected mode 0600, found {mode:04o}: run `chmod 600 {quoted}`, or name the one "
                f"group that may read it as [secrets] secret_group"
            )
    elif mode & 0o037:
        raise SecretsError(f"{path}: expected mode 0640 or 0600, found {mode:04o}: run `chmod 640 {quoted}`")
    elif mode & 0o040 and gid not in (info.st_gid, ANY_GROUP):
        raise SecretsError(
            f"{path}: expected a file that only secret_group (gid {gid}) may read, found group "
            f"{info.st_gid}: run `chgrp {gid} {quoted}`, or `chmod 600 {quoted}`"
        )


def _open_to(path: Path | int, gid: int | None, *, mode: int) -> None:
    """Let the group in; nothing for nobody."""
    if gid is not None:
        os.chown(path, -1, gid)
        os.chmod(path, mode)


def _name(scratch: Path, path: Path) -> None:
    """Give `scratch` its name; FileExistsError if another file has it."""
    try:
        os.link(scratch, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # without hard links, only a writer in this very instant could be replaced
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(scratch, path)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
