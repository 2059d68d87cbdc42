"""The releases that lie in a model's version folder: list them, choose one of them, remove old ones.

What engine.json says is shown for a release that the chain refuses, too, beside the refusal: it helps a
person to tell which one that is, and nothing more.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import ReleaseError
from engines.history import previous_release, read_history
from engines.loading import InspectedRelease, current_digest, inspect_release
from engines.manifest import MANIFEST, EngineManifest, parse_manifest
from engines.release_folder import ReleaseFolder, shown
from engines.signing import MAX_MANIFEST_BYTES
from engines.trust import TrustSettings
from engines.version_folder import RELEASES, changing, scratch, sync_folder

DIGEST = re.compile(r"[0-9a-f]{64}")
_LEAST_PREFIX = 6
_NUMBER = re.compile(r"[0-9]{1,18}")
_PREFIX = re.compile(rf"[0-9a-f]{{{_LEAST_PREFIX},64}}")


@dataclass(frozen=True, slots=True)
class ListedRelease:
    """One release folder. `refusal` None: signature, names, age and sizes are right (its bytes unread).

    `manifest` is None where none can be read; `published` is when its files were written, in seconds since
    1970.
    """

    digest: str
    manifest: EngineManifest | None
    nbytes: int
    published: float
    refusal: ReleaseError | None
    current: bool
    previous: bool

    @property
    def release(self) -> int:
        """Its number; −1 where that cannot be read."""
        return -1 if self.manifest is None else self.manifest.release


def list_releases(version_dir: Path, *, model: str, trust: TrustSettings) -> tuple[ListedRelease, ...]:
    """All releases of a model, newest first. ReleaseError if there is no such folder."""
    current = current_or_none(version_dir)
    previous = previous_release(read_history(version_dir), current)
    listed = (
        _listed(version_dir, digest, current=current, previous=previous, model=model, trust=trust)
        for digest in _digests(version_dir)
    )
    return tuple(sorted(listed, key=lambda one: (one.release, one.published), reverse=True))


def current_or_none(version_dir: Path) -> str | None:
    """What `current` names; None if it names nothing, which is no reason not to make it name something."""
    try:
        return current_digest(version_dir)
    except ReleaseError:
        return None


def earlier_releases(version_dir: Path) -> tuple[str, ...]:
    """What was current before and is still there, the latest first; nothing if the history cannot be read."""
    current = current_or_none(version_dir)
    try:
        history = read_history(version_dir)
    except ReleaseError:
        return ()
    others = dict.fromkeys(served.digest for served in reversed(history) if served.digest != current)
    return tuple(digest for digest in others if (version_dir / RELEASES / digest).is_dir())


def choose_release(version_dir: Path, wanted: str) -> str:
    """The digest of the one release whose number, or the beginning of whose digest, is `wanted`."""
    found = {digest for digest in _digests(version_dir) if _matches(version_dir, digest, wanted)}
    if len(found) != 1:
        expected = f"one release whose number is {shown(wanted)}, or whose digest begins with it"
        some = ", ".join(sorted(digest[:16] for digest in found))
        raise ReleaseError(
            "rollback",
            expected=expected,
            found=some or f"none (a digest needs {_LEAST_PREFIX} digits or more)",
        )
    return found.pop()


def prune_releases(
    version_dir: Path,
    *,
    keep: int,
    spare: Collection[str] = (),
    model: str,
    trust: TrustSettings,
    lock_seconds: float = 60.0,
) -> tuple[ListedRelease, ...]:
    """Remove all but the `keep` newest releases; those removed.

    The current and the previous one stay in any case, and so do those whose digests begin with one of
    `spare`. Whoever is killed in between leaves whole releases and what the next holder of the lock clears.
    """
    with changing(version_dir, lock_seconds=lock_seconds):
        listed = list_releases(version_dir, model=model, trust=trust)
        removed = tuple(
            one
            for one in listed[keep:]
            if not (one.current or one.previous or one.digest.startswith(tuple(spare)))
        )
        for one in removed:  # no longer a release by one rename; cleared on the way out
            os.rename(version_dir / RELEASES / one.digest, scratch(version_dir / RELEASES))
        sync_folder(version_dir / RELEASES)
    return removed


def _digests(version_dir: Path) -> Sequence[str]:
    with ReleaseFolder.open(version_dir, follow=True) as version, version.folder(RELEASES) as releases:
        return sorted(name for name in releases.subfolders() if DIGEST.fullmatch(name))


def _listed(
    version_dir: Path,
    digest: str,
    *,
    current: str | None,
    previous: str | None,
    model: str,
    trust: TrustSettings,
) -> ListedRelease:
    folder = version_dir / RELEASES / digest
    refusal: ReleaseError | None = None
    manifest: EngineManifest | None
    try:
        inspected: InspectedRelease = inspect_release(version_dir, digest, model=model, trust=trust)
        manifest = inspected.manifest
    except ReleaseError as error:
        refusal, manifest = error, _unproven_manifest(folder)
    nbytes, published = _size_and_time(folder)
    return ListedRelease(
        digest=digest,
        manifest=manifest,
        nbytes=nbytes,
        published=published,
        refusal=refusal,
        current=digest == current,
        previous=digest == previous,
    )


def _unproven_manifest(folder: Path) -> EngineManifest | None:
    try:
        with ReleaseFolder.open(folder) as opened:
            return parse_manifest(bytes(opened.read(MANIFEST, limit=MAX_MANIFEST_BYTES).data))
    except ReleaseError:
        return None


def _size_and_time(folder: Path) -> tuple[int, float]:
    """Bytes of its files, and when the first of them was written; of what can be seen."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.stat(follow_symlinks=False) for entry in entries]
        own = folder.stat().st_mtime
    except OSError:  # it was removed in between
        return 0, 0.0
    return sum(status.st_size for status in found), min((one.st_mtime for one in found), default=own)


def _matches(version_dir: Path, digest: str, wanted: str) -> bool:
    if _PREFIX.fullmatch(wanted) and digest.startswith(wanted):
        return True
    if not _NUMBER.fullmatch(wanted):
        return False
    manifest = _unproven_manifest(version_dir / RELEASES / digest)
    return manifest is not None and manifest.release == int(wanted)
