"""Change the release that a model serves: readers see the old one or the new one, nothing in between.

    <version>/current                     one line: the digest of the release that serves
    <version>/history                     what was current before (engines/history.py)
    <version>/releases/<digest>/          immutable once it has this name

Invariants
- `current` is replaced by one rename, and only after the release it will name is on disk under its final
  name, was fsynced, and passed the whole load chain there. Whoever is killed in between leaves the old
  release serving.
- Whatever was current is in `history`, on disk, before `current` names another.
- What is written is the verified bytes from memory, not a second read of the source folder.
- Publishing the same release again changes nothing, except that a damaged copy of it is replaced by a sound
  one, and that `current` is a new file with the same line: a server that refused it tries it once more.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.errors import ReleaseError
from engines.history import Served, append_history, previous_release, read_history
from engines.loading import VerifiedRelease, load_release, load_release_dir
from engines.manifest import SIGNATURE
from engines.release_folder import ReleaseFolder
from engines.release_list import choose_release, current_or_none
from engines.signing import MAX_SIGNATURE_BYTES
from engines.trust import TrustSettings
from engines.version_folder import CURRENT, RELEASES, changing, scratch, sync_folder, write_file

LOCK_SECONDS = 60.0

Clock = Callable[[], float]
"""Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Switch:
    """What `current` names now, and what it named before: None if nothing, the same if nothing changed."""

    digest: str
    release: int
    before: str | None

    @property
    def changed(self) -> bool:
        """Whether another release is current than before."""
        return self.before != self.digest


def publish_release(
    release_dir: Path,
    version_dir: Path,
    *,
    model: str,
    trust: TrustSettings,
    lock_seconds: float = LOCK_SECONDS,
    clock: Clock = time.time,
) -> Switch:
    """Verify `release_dir`, copy it into `version_dir` and make it the current release.

    ReleaseError if a check of the load chain refuses it, the disk does, or somebody else changes the model's
    releases for longer than `lock_seconds`.
    """
    release = load_release_dir(release_dir, model=model, trust=trust)
    digest = release.digest
    target = version_dir / RELEASES / digest
    with changing(version_dir, lock_seconds=lock_seconds):
        if not _holds(target, release):
            _write_release(release, target)
        elif _signature(target) != release.files[SIGNATURE]:
            _write_signature(release, target)
        del release  # the copy is verified from disk: do not hold the weights twice
        return _verify_and_switch(version_dir, digest, model=model, trust=trust, clock=clock)


def roll_back(
    version_dir: Path,
    *,
    model: str,
    trust: TrustSettings,
    to: str | None = None,
    lock_seconds: float = LOCK_SECONDS,
    clock: Clock = time.time,
) -> Switch:
    """Make the release current that was so before, or the one that `to` (digest or number) chooses.

    It passes the whole load chain first: ReleaseError if it is damaged, older than the trust settings allow,
    or not there; nothing has changed then. Doing it twice without `to` comes back to where it began.
    """
    if not (version_dir / RELEASES).is_dir():
        raise ReleaseError("rollback", expected=f"a published release in {version_dir}", found="none")
    with changing(version_dir, lock_seconds=lock_seconds):
        digest = _previous(version_dir) if to is None else choose_release(version_dir, to)
        return _verify_and_switch(version_dir, digest, model=model, trust=trust, clock=clock)


def _previous(version_dir: Path) -> str:
    current = current_or_none(version_dir)
    digest = previous_release(read_history(version_dir), current)
    if digest is None:
        expected = f"a release that was current before {current[:16] if current else 'this'}"
        raise ReleaseError("rollback", expected=expected, found="none in the history (choose one by --to)")
    if not (version_dir / RELEASES / digest).is_dir():
        expected = f"the release that was current before ({digest[:16]})"
        raise ReleaseError("rollback", expected=expected, found="that it was removed (choose one by --to)")
    return digest


def _verify_and_switch(
    version_dir: Path, digest: str, *, model: str, trust: TrustSettings, clock: Clock
) -> Switch:
    number = load_release(version_dir, digest, model=model, trust=trust).manifest.release
    before = current_or_none(version_dir)
    if before is not None and before != digest:
        append_history(version_dir, Served(before, clock()))
    _write_current(version_dir, digest)
    return Switch(digest, number, before)


def _holds(target: Path, release: VerifiedRelease) -> bool:
    """Whether `target` has the very bytes of `release`, whoever signed them."""
    try:
        with ReleaseFolder.open(target) as folder:
            if folder.files() != release.files.keys():
                return False
            unsigned = [(name, data) for name, data in release.files.items() if name != SIGNATURE]
            return all(folder.read(name, size=len(data)).data == data for name, data in unsigned)
    except ReleaseError:  # not there, or damaged: it will be written anew
        return False


def _signature(target: Path) -> memoryview:
    with ReleaseFolder.open(target) as folder:
        return folder.read(SIGNATURE, limit=MAX_SIGNATURE_BYTES).data


def _write_signature(release: VerifiedRelease, target: Path) -> None:
    """Put a newer signature (another key) beside equal bytes, whole or not at all."""
    made = scratch(target.parent)
    write_file(made, release.files[SIGNATURE], mode=0o444)
    os.replace(made, target / SIGNATURE)
    sync_folder(target)


def _write_release(release: VerifiedRelease, target: Path) -> None:
    releases = target.parent
    made = scratch(releases)
    made.mkdir(mode=0o755)
    for name, data in release.files.items():
        write_file(made / name, data, mode=0o444)
    sync_folder(made)
    if os.path.lexists(target):  # a damaged copy, which nobody can load; a folder cannot be renamed over it
        os.rename(target, scratch(releases))
    os.rename(made, target)
    for folder in (releases, releases.parent, releases.parent.parent):
        sync_folder(folder)


def _write_current(version_dir: Path, digest: str) -> None:
    made = scratch(version_dir / RELEASES)
    write_file(made, memoryview(f"{digest}\n".encode()), mode=0o644)
    os.replace(made, version_dir / CURRENT)
    sync_folder(version_dir)
