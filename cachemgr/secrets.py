"""The secrets of a node: one that names blocks, and the ones that tag shards, by key id.

A directory holds `naming.key` and `tag-<key_id>.key`, each 32 random bytes in hex, mode 0600. Tag secrets
rotate: the highest key id seals, every file still there opens. The naming secret never rotates except as a
deliberate flush.

Invariants
- No secret appears in a repr, a log line or an error text.
- A file has its name only once it is whole and on disk; a file that has a name is never replaced.
"""

import contextlib
import errno
import os
import re
import secrets as random_source
import stat
from collections.abc import Mapping
from pathlib import Path

from cachemgr.errors import SecretsError
from cachemgr.keys import derive_key

SECRET_NBYTES = 32
NAMING_FILE = "naming.key"
_TAG_FILE = re.compile(r"tag-(0|[1-9][0-9]{0,9})\.key")
_CONTENT = re.compile(rb"([0-9A-Fa-f]{%d})(\r?\n)?" % (2 * SECRET_NBYTES))
_MAX_KEY_ID = 2**32 - 1
_PROBE_PURPOSE = b"tensorcache/probe/1"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class CacheSecrets:
    """Naming secret and tag secrets; build one with `load` or `generate`."""

    __slots__ = ("_naming", "_tags")

    def __init__(self, naming: bytes, tags: Mapping[int, bytes]) -> None:
        if len(naming) != SECRET_NBYTES or any(len(secret) != SECRET_NBYTES for secret in tags.values()):
            raise SecretsError(f"secrets: each must be {SECRET_NBYTES} bytes")
        if not tags or not all(0 <= key_id <= _MAX_KEY_ID for key_id in tags):
            raise SecretsError(f"secrets: need at least one tag secret with a key id in [0, {_MAX_KEY_ID}]")
        self._naming = naming
        self._tags = dict(tags)

    @classmethod
    def load(cls, directory: Path) -> "CacheSecrets":
        """Read every secret of `directory`; SecretsError for what others could read or have written."""
        _check_directory(directory)
        tags = {key_id: _read(path) for key_id, path in _tag_files(directory).items()}
        if not tags:
            raise SecretsError(f"{directory}: expected at least one tag-<key_id>.key, found none")
        return cls(_read(directory / NAMING_FILE), tags)

    @classmethod
    def generate(cls, directory: Path) -> "CacheSecrets":
        """Create `directory` (0700) with fresh secrets, tag key id 1; SecretsError if one is there."""
        _make_directory(directory)
        for name in (NAMING_FILE, "tag-1.key"):
            _create(directory / name)
        return cls.load(directory)

    @property
    def naming(self) -> bytes:
        """The secret that block hashes are keyed from."""
        return self._naming

    @property
    def tags(self) -> Mapping[int, bytes]:
        """Tag secrets by key id, old ones included."""
        return self._tags

    @property
    def sealing_key_id(self) -> int:
        """The key id new shards are sealed with: the highest."""
        return max(self._tags)

    def __repr__(self) -> str:
        return f"CacheSecrets(key_ids={sorted(self._tags)})"


def complete_secrets(directory: Path, *, rotate: bool = False) -> list[Path]:
    """Create what `directory` lacks, and with `rotate` a tag secret of the next key id; the new files.

    SecretsError for a file that is there and cannot be used: it is named and never replaced, because with
    other secrets every block cached so far is lost.
    """
    _make_directory(directory)
    naming, tags = directory / NAMING_FILE, _tag_files(directory)
    for path in (naming, *tags.values()):
        if os.path.lexists(path):
            _read(path)
    wanted = [] if os.path.lexists(naming) else [naming]
    if rotate or not tags:
        key_id = max(tags, default=0) + 1
        if key_id > _MAX_KEY_ID:
            raise SecretsError(f"{directory}: no key id above {_MAX_KEY_ID} is left")
        wanted.append(directory / f"tag-{key_id}.key")
    for path in wanted:
        _create(path)
    return wanted


def probe_secret(secrets: CacheSecrets) -> bytes:
    """32 bytes that all processes of one naming secret share, and that say nothing about it.

    They admit a node's own health probe; no key that names or tags blocks comes of them.
    """
    return derive_key(secrets.naming, purpose=_PROBE_PURPOSE, context=b"")


def _tag_files(directory: Path) -> dict[int, Path]:
    """The files of tag secrets by key id, in order."""
    found = ((_TAG_FILE.fullmatch(path.name), path) for path in directory.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SecretsError(f"{directory}: cannot be created ({error.strerror})") from None
    _check_directory(directory)


def _check_directory(directory: Path) -> None:
    try:
        info = directory.stat()
    except OSError as error:
        raise SecretsError(f"{directory}: cannot be read ({error.strerror})") from None
    if not stat.S_ISDIR(info.st_mode):
        raise SecretsError(f"{directory}: expected a directory")
    if info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022:
        raise SecretsError(f"{directory}: must belong to this user and be writable by no one else")


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SecretsError(f"{path}: cannot be opened ({error.strerror})") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise SecretsError(f"{path}: must be a regular file of this user")
        if info.st_mode & 0o077:
            raise SecretsError(f"{path}: expected mode 0600, found {stat.S_IMODE(info.st_mode):04o}")
        text = file.read(2 * SECRET_NBYTES + 3)
    match = _CONTENT.fullmatch(text)
    if match is None:
        found = f"{info.st_size} bytes of something else" if info.st_size else "an empty file"
        raise SecretsError(
            f"{path}: expected {SECRET_NBYTES} bytes in hex, found {found}: restore the file, or delete it "
            f"and make a new one with `tensorcache secret new {path.parent}`"
        )
    return bytes.fromhex(match[1].decode())


def _create(path: Path) -> None:
    """A fresh secret under its name, whole and on disk, or no file at all (a disk may be full)."""
    scratch = path.with_name(f".{path.name}.{random_source.token_hex(8)}")
    try:
        try:
            fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(random_source.token_hex(SECRET_NBYTES) + "\n")
                file.flush()
                os.fsync(fd)
            _name(scratch, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                scratch.unlink()
        _sync_directory(path.parent)
    except OSError as error:
        raise SecretsError(f"{path}: cannot be created ({error.strerror})") from None


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
