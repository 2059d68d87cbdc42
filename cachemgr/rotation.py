"""Follows a folder of secrets while a cache is open: which tag secrets open shards now, and which one seals.

A folder is looked at about once a second: one listing, one stat for each file, and a read of what is new. A
file that vanished is forgotten at once. One that cannot be used, perhaps because it is being copied this
moment, changes nothing; it is tried again at each look, and said once for as long as the trouble is the same.

Threads: one.
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cachemgr.errors import SecretsError
from cachemgr.secret_files import ANY_GROUP, check_directory, read_secret, tag_files
from cachemgr.secrets import GRACE_S, CacheSecrets, SecretsOrigin, expiry_of

log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int, int]
_UNSEEN: _Stamp = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _TagFile:
    secret: bytes = field(repr=False)
    stamp: _Stamp
    appeared: float


class Rotation:
    """What became of the secrets that a cache was opened with."""

    def __init__(self, secrets: CacheSecrets) -> None:
        self._origin = secrets.origin
        self._tags = secrets.tags
        now = secrets.origin.clock() if secrets.origin else 0.0
        self._known = {key_id: _TagFile(secret, _UNSEEN, now) for key_id, secret in secrets.tags.items()}
        self._troubles: frozenset[str] = frozenset()

    def look(self) -> Mapping[int, bytes] | None:
        """The tag secrets by key id, if they are others than at the last look; the highest key id seals.

        None if nothing changed. Empty if no file is left: then nothing can be sealed or opened.
        """
        origin = self._origin
        if origin is None:
            return None
        self._known, troubles = _read_folder(origin, self._known)
        for trouble in sorted(troubles - self._troubles):
            log.warning("secrets: %s; those read before stay in use", trouble)
        self._troubles = troubles
        tags = _in_use(origin, self._known)
        if tags == self._tags:
            return None
        self._say_change(origin, tags)
        self._tags = tags
        return tags

    def _say_change(self, origin: SecretsOrigin, tags: Mapping[int, bytes]) -> None:
        if not tags:
            log.warning(
                "secrets: %s: no tag secret is left; nothing is cached until there is", origin.directory
            )
            return
        sealing = max(tags)
        older = ", ".join(str(key_id) for key_id in sorted(tags) if key_id != sealing) or "no other"
        log.info(
            "secrets: %s: blocks are sealed with key id %d; of the older ones %s is read",
            origin.directory, sealing, older,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TagKey:
    """A tag secret as its owner sees it; never its value.

    `appeared` and `expires` are seconds since the epoch; the newest never expires. `trouble`: why it cannot
    be used, "" if it can; one that cannot neither seals nor counts as a successor, and both times are NaN.
    """

    key_id: int
    path: Path
    appeared: float
    expires: float
    sealing: bool
    trouble: str = ""


def list_tag_keys(directory: Path, *, grace_s: float = GRACE_S) -> list[TagKey]:
    """Every tag secret of a folder, oldest key id first. SecretsError if it cannot be listed."""
    check_directory(directory)
    appeared: dict[int, float] = {}
    troubles: dict[int, str] = {}
    files = tag_files(directory)
    for key_id, path in files.items():
        try:
            _, info = read_secret(path, gid=ANY_GROUP)
            appeared[key_id] = info.st_mtime
        except SecretsError as error:
            troubles[key_id] = str(error)
    expiry = expiry_of(appeared, grace_s=grace_s)
    newest = max(appeared, default=-1)
    nan = float("nan")
    return [
        TagKey(
            key_id, path, appeared.get(key_id, nan), expiry.get(key_id, nan),
            sealing=key_id == newest, trouble=troubles.get(key_id, ""),
        )
        for key_id, path in files.items()
    ]  # fmt: skip


def prune_tag_keys(directory: Path, *, grace_s: float = GRACE_S, now: float | None = None) -> list[Path]:
    """Remove the files of expired tag secrets; never the newest, none that cannot be read. What went."""
    moment = time.time() if now is None else now
    expired = [key.path for key in list_tag_keys(directory, grace_s=grace_s) if key.expires <= moment]
    for path in expired:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SecretsError(f"{path}: cannot be removed ({error.strerror})") from None
    return expired


def _read_folder(
    origin: SecretsOrigin, known: dict[int, _TagFile]
) -> tuple[dict[int, _TagFile], frozenset[str]]:
    """The folder now, and what is wrong with it; files that did not change are not read again."""
    try:
        check_directory(origin.directory)
        files = tag_files(origin.directory)
    except SecretsError as error:
        return known, frozenset([str(error)])
    found: dict[int, _TagFile] = {}
    troubles = set()
    for key_id, path in files.items():
        before = known.get(key_id)
        try:
            found[key_id] = before if before and before.stamp == _stamp_at(path) else _read(path, origin)
        except FileNotFoundError:
            continue  # it vanished between the listing and now
        except (SecretsError, OSError) as error:
            troubles.add(str(error))
            if before is not None:
                found[key_id] = before
    return found, frozenset(troubles)


def _read(path: Path, origin: SecretsOrigin) -> _TagFile:
    secret, info = read_secret(path, gid=origin.gid)
    return _TagFile(secret, _stamp(info), info.st_mtime)


def _stamp_at(path: Path) -> _Stamp:
    return _stamp(os.lstat(path))


def _stamp(info: os.stat_result) -> _Stamp:
    """Changes with the content, the owner and the mode of a file."""
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _in_use(origin: SecretsOrigin, known: Mapping[int, _TagFile]) -> dict[int, bytes]:
    expiry = expiry_of({key_id: file.appeared for key_id, file in known.items()}, grace_s=origin.grace_s)
    now = origin.clock()
    return {key_id: file.secret for key_id, file in known.items() if now < expiry[key_id]}
