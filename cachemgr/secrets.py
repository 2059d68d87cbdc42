"""The secrets of a node: one that names blocks, and the ones that tag shards, by key id.

A directory holds `naming.key` and `tag-<key_id>.key` (see secret_files.py). Tag secrets rotate: the highest
key id seals, and each older one opens until `grace_s` after the next one came up; rotation.py follows that
while a cache is open. The naming secret never rotates except as a deliberate flush.

Invariant: no secret appears in a repr, a log line or an error text.
"""

import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from cachemgr.errors import SecretsError
from cachemgr.keys import derive_key
from cachemgr.secret_files import (
    ANY_GROUP,
    MAX_KEY_ID,
    NAMING_FILE,
    SECRET_NBYTES,
    check_directory,
    create_secret,
    group_id,
    make_directory,
    read_secret,
    tag_file,
    tag_files,
)

GRACE_S = 86_400.0
_PROBE_PURPOSE = b"tensorcache/probe/1"


@dataclass(frozen=True, slots=True)
class SecretsOrigin:
    """Where secrets were read, and by which rule: enough to look there again.

    `gid`: the group that may read the files, too. `clock`: seconds since the epoch, as files have them.
    """

    directory: Path
    gid: int | None = None
    grace_s: float = GRACE_S
    clock: Callable[[], float] = time.time


class CacheSecrets:
    """Naming secret and tag secrets, as they were once; build one with `load` or `generate`."""

    __slots__ = ("_naming", "_origin", "_tags")

    def __init__(
        self, naming: bytes, tags: Mapping[int, bytes], *, origin: SecretsOrigin | None = None
    ) -> None:
        if len(naming) != SECRET_NBYTES or any(len(secret) != SECRET_NBYTES for secret in tags.values()):
            raise SecretsError(f"secrets: each must be {SECRET_NBYTES} bytes")
        if not tags or not all(0 <= key_id <= MAX_KEY_ID for key_id in tags):
            raise SecretsError(f"secrets: need at least one tag secret with a key id in [0, {MAX_KEY_ID}]")
        self._naming = naming
        self._tags = MappingProxyType(dict(tags))
        self._origin = origin

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        group: str = "",
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.time,
    ) -> "CacheSecrets":
        """Read every secret of `directory`; SecretsError for what others could read or have written.

        `group`: name of the one group that may read them, too; "" for none. A tag secret is left out once its
        successor is older than `grace_s`.
        """
        origin = SecretsOrigin(directory, group_id(group), grace_s, clock)
        check_directory(directory)
        found = {key_id: read_secret(path, gid=origin.gid) for key_id, path in tag_files(directory).items()}
        if not found:
            raise SecretsError(
                f"{directory}: expected at least one tag-<key_id>.key, found none: "
                f"`tensorcache secret new {directory}` makes one"
            )
        expiry = expiry_of({key_id: info.st_mtime for key_id, (_, info) in found.items()}, grace_s=grace_s)
        now = clock()
        tags = {key_id: secret for key_id, (secret, _) in found.items() if now < expiry[key_id]}
        naming, _ = read_secret(directory / NAMING_FILE, gid=origin.gid)
        return cls(naming, tags, origin=origin)

    @classmethod
    def generate(cls, directory: Path) -> "CacheSecrets":
        """Create `directory` (0700) with fresh secrets, tag key id 1; SecretsError if one is there."""
        make_directory(directory)
        for path in (directory / NAMING_FILE, tag_file(directory, 1)):
            create_secret(path)
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

    @property
    def origin(self) -> SecretsOrigin | None:
        """Where they were read; None for secrets of no folder, which never change."""
        return self._origin

    def __repr__(self) -> str:
        return f"CacheSecrets(key_ids={sorted(self._tags)})"


def expiry_of(appeared: Mapping[int, float], *, grace_s: float) -> dict[int, float]:
    """Until when each key id is read: `grace_s` after the next higher one appeared; the highest for ever."""
    ids = sorted(appeared)
    ends = [appeared[newer] + grace_s for newer in ids[1:]]
    return dict(zip(ids, [*ends, float("inf")], strict=False))


def complete_secrets(directory: Path, *, rotate: bool = False, group: str = "") -> list[Path]:
    """Create what `directory` lacks, and with `rotate` a tag secret of the next key id; the new files.

    `group`: who else may read them; "": the group that may read the naming secret that is there, if any.
    SecretsError for a file that is there and cannot be used: it is named and never replaced, because with
    other secrets every block cached so far is lost.
    """
    gid = group_id(group)
    make_directory(directory, gid=gid)
    naming, tags = directory / NAMING_FILE, tag_files(directory)
    for path in (naming, *tags.values()):
        if os.path.lexists(path):
            _, info = read_secret(path, gid=ANY_GROUP)
            if path == naming and gid is None and info.st_mode & stat.S_IRGRP:
                gid = info.st_gid
    wanted = [] if os.path.lexists(naming) else [naming]
    if rotate or not tags:
        key_id = max(tags, default=0) + 1
        if key_id > MAX_KEY_ID:
            raise SecretsError(f"{directory}: no key id above {MAX_KEY_ID} is left")
        wanted.append(tag_file(directory, key_id))
    for path in wanted:
        create_secret(path, gid=gid)
    return wanted


def probe_secret(secrets: CacheSecrets) -> bytes:
    """32 bytes that all processes of one naming secret share, and that say nothing about it.

    They admit a node's own health probe; no key that names or tags blocks comes of them.
    """
    return derive_key(secrets.naming, purpose=_PROBE_PURPOSE, context=b"")
