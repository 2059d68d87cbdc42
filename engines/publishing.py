"""Put a signed release where a model serves from: readers see the old one or the new one, nothing in between.

    <version>/current                     one line: the digest of the release that serves
    <version>/releases/<digest>/          immutable once it has this name
    <version>/releases/.lock              held while someone publishes; the kernel lets go of it when he dies
    <version>/releases/.new-…             in the making, removed if that fails; the next publisher clears what
                                          a killed one left

Invariants
- `current` is replaced by one rename, and only after the release it will name is on disk under its final
  name, was fsynced, and passed the whole load chain there. Whoever is killed in between leaves the old
  release serving.
- What is written is the verified bytes from memory, not a second read of the source folder.
- Publishing the same release again changes nothing, except that a damaged copy of it is replaced by a sound
  one.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.errors import ReleaseError
from engines.loading import CURRENT, RELEASES, VerifiedRelease, load_release_dir
from engines.manifest import SIGNATURE
from engines.release_folder import ReleaseFolder
from engines.signing import MAX_SIGNATURE_BYTES
from engines.trust import TrustSettings

_LOCK = ".lock"
_NEW = ".new-"


def publish_release(
    release_dir: Path,
    version_dir: Path,
    *,
    model: str,
    trust: TrustSettings,
    lock_seconds: float = 60.0,
) -> str:
    """Verify `release_dir`, copy it into `version_dir` and make it the current release; its digest.

    ReleaseError if a check of the load chain refuses it, the disk does, or another publisher is at work for
    longer than `lock_seconds`.
    """
    release = load_release_dir(release_dir, model=model, trust=trust)
    digest = release.digest
    releases = version_dir / RELEASES
    target = releases / digest
    try:
        releases.mkdir(parents=True, exist_ok=True)
        with _publisher_lock(releases / _LOCK, lock_seconds), _scratch_cleared(releases):
            if not _holds(target, release):
                _write_release(release, target)
            elif _signature(target) != release.files[SIGNATURE]:
                _write_signature(release, target)
            del release  # the copy is verified from disk: do not hold the weights twice
            copy = load_release_dir(target, model=model, trust=trust)
            if copy.digest != digest:
                raise ReleaseError("digest", expected=f"release {digest} in {target}", found=copy.digest)
            _write_current(version_dir, digest)
    except OSError as error:
        found = f"{error.strerror or error} ({error.filename or releases})"
        raise ReleaseError("publish", expected=f"to write to {version_dir}", found=found) from None
    return digest


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
    scratch = _scratch(target.parent)
    _write_file(scratch, release.files[SIGNATURE], mode=0o444)
    os.replace(scratch, target / SIGNATURE)
    _sync_folder(target)


def _write_release(release: VerifiedRelease, target: Path) -> None:
    releases = target.parent
    scratch = _scratch(releases)
    scratch.mkdir(mode=0o755)
    for name, data in release.files.items():
        _write_file(scratch / name, data, mode=0o444)
    _sync_folder(scratch)
    if os.path.lexists(target):  # a damaged copy, which nobody can load; a folder cannot be renamed over it
        os.rename(target, _scratch(releases))
    os.rename(scratch, target)
    for folder in (releases, releases.parent, releases.parent.parent):
        _sync_folder(folder)


def _write_current(version_dir: Path, digest: str) -> None:
    scratch = _scratch(version_dir / RELEASES)
    _write_file(scratch, memoryview(f"{digest}\n".encode()), mode=0o644)
    os.replace(scratch, version_dir / CURRENT)
    _sync_folder(version_dir)


def _scratch(releases: Path) -> Path:
    return releases / f"{_NEW}{secrets.token_hex(8)}"


def _write_file(path: Path, data: memoryview, *, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _scratch_cleared(releases: Path) -> Iterator[None]:
    """Nothing in the making before (the copy may need its room) and after, whether it succeeds or not."""
    _clear_leftovers(releases)
    try:
        yield
    finally:
        _clear_leftovers(releases)


def _clear_leftovers(releases: Path) -> None:
    """Remove what killed publishers left. Only the holder of the lock may: nobody else is at work then."""
    for path in releases.glob(f"{_NEW}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def _publisher_lock(path: Path, seconds: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + seconds
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                raise ReleaseError(
                    "publish", expected=f"no other publisher for {seconds:g} s", found=f"{path} held"
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
