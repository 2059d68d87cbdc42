"""Which release `<version>/current` means, and whether it is worth another try: a cheap look."""

import os
from pathlib import Path
from typing import NamedTuple

from engines import ReleaseError, current_digest

_CURRENT = "current"
_SIGNED = "model.sig"


class Target(NamedTuple):
    """What `current` names. `stamp` changes when the release's folder or its signature does, and when it is
    deployed again.

    Without a readable `current` the digest is empty, and `problem` says why.
    """

    digest: str
    stamp: tuple[int, ...] = ()
    problem: str = ""


def release_dir(version_dir: Path, digest: str) -> Path:
    """Where a published release lies."""
    return version_dir / "releases" / digest


def look(version_dir: Path) -> Target:
    """What `current` names now."""
    try:
        digest = current_digest(version_dir)
    except ReleaseError as error:
        return Target("", problem=str(error))
    folder = release_dir(version_dir, digest)
    return Target(digest, (*_stamp(version_dir / _CURRENT), *_stamp(folder), *_stamp(folder / _SIGNED)))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        info = os.stat(path)
    except OSError:
        return ()
    return info.st_ino, info.st_mtime_ns, info.st_size
