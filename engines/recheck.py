"""Look again at a release that was loaded: is its folder still what was verified then?

Two looks. `compare_release` compares names, sizes, times and inodes: a few system calls. `rehash_release`
reads every byte, as slowly as its pace says, and compares digests; it also tells a file that was merely
touched, or replaced by an equal one, from one that was altered.

What is loaded lies in private memory and cannot change with the folder. A difference means that the next load
would be refused, and that somebody can write where nobody should.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engines.errors import ReleaseError
from engines.loading import FileFacts, ReleaseFacts
from engines.manifest import SIGNATURE
from engines.release_folder import FileStatus, OnPiece, ReleaseFolder, shown
from engines.signing import MAX_SIGNATURE_BYTES, verify_signature
from engines.trust import TrustSettings

OpenFolder = Callable[[Path], AbstractContextManager[ReleaseFolder]]
OnBytes = Callable[[str, int], None]
"""Hears a file's name and how many more of its bytes were read."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One file (or the folder itself, by its path) that is not what was loaded."""

    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Rehash:
    """What a full look found; `facts` is what to compare with from now on, if there is no difference."""

    differences: tuple[Difference, ...]
    facts: ReleaseFacts


class Pace:
    """Holds a reader to `bytes_per_s`; time it did not use is not saved up for a burst.

    `pause` is called after every piece, with 0 seconds too, and may raise to end the reading.
    """

    def __init__(
        self, bytes_per_s: float, *, clock: Callable[[], float], pause: Callable[[float], None]
    ) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._pause = pause
        self._due = clock()

    def __call__(self, nbytes: int) -> None:
        """Wait until `nbytes` more may have been read."""
        now = self._clock()
        self._due = max(self._due, now) + nbytes / self._rate
        self._pause(self._due - now)


def compare_release(
    facts: ReleaseFacts, *, folders: OpenFolder = ReleaseFolder.open
) -> tuple[Difference, ...]:
    """Differences in names, sizes, times of writing and inodes since `facts` were taken."""
    try:
        with folders(facts.path) as folder:
            files = [_compare(folder, name, file.status) for name, file in facts.files.items()]
            return tuple(one for one in (_extra(folder, facts), *files) if one is not None)
    except ReleaseError as error:
        return (_difference(str(facts.path), error),)


def rehash_release(
    facts: ReleaseFacts,
    *,
    trust: TrustSettings,
    pace: Pace,
    folders: OpenFolder = ReleaseFolder.open,
    on_bytes: OnBytes = lambda name, nbytes: None,
) -> Rehash:
    """Read every byte and compare with the digests in `facts`.

    Another model.sig is no difference if a trusted key made it for the same bytes: a release can be signed
    again.
    """
    files = dict(facts.files)
    found: list[Difference | None] = []
    try:
        with folders(facts.path) as folder:
            found.append(_extra(folder, facts))
            for name, file in facts.files.items():

                def read(nbytes: int, name: str = name) -> None:
                    on_bytes(name, nbytes)
                    pace(nbytes)

                try:
                    files[name] = (
                        _signed_again(folder, facts, trust)
                        if name == SIGNATURE
                        else _hashed(folder, name, file, on_piece=read)
                    )
                except ReleaseError as error:
                    found.append(_difference(name, error))
    except ReleaseError as error:
        found.append(_difference(str(facts.path), error))
    differences = tuple(one for one in found if one is not None)
    return Rehash(differences, dataclasses.replace(facts, files=MappingProxyType(files)))


def _extra(folder: ReleaseFolder, facts: ReleaseFacts) -> Difference | None:
    extra = folder.names() - facts.files.keys()
    return Difference(shown(min(extra)), "nothing of this name", "a file or folder") if extra else None


def _compare(folder: ReleaseFolder, name: str, loaded: FileStatus) -> Difference | None:
    try:
        status = folder.status(name)
    except ReleaseError as error:
        return _difference(name, error)
    return None if status == loaded else Difference(name, str(loaded), str(status))


def _hashed(folder: ReleaseFolder, name: str, file: FileFacts, *, on_piece: OnPiece) -> FileFacts:
    sha256, status = folder.hash(name, size=file.status.size, on_piece=on_piece)
    if sha256 != file.sha256:
        raise ReleaseError("digest", expected=f"SHA-256 {file.sha256}", found=sha256)
    return FileFacts(sha256, status)


def _signed_again(folder: ReleaseFolder, facts: ReleaseFacts, trust: TrustSettings) -> FileFacts:
    read = folder.read(SIGNATURE, limit=MAX_SIGNATURE_BYTES)
    if read.sha256 != facts.files[SIGNATURE].sha256:
        vouched = {name: file.sha256 for name, file in facts.files.items() if name != SIGNATURE}
        if verify_signature(bytes(read.data), trust.keys) != vouched:
            raise ReleaseError(
                "signature", expected="one over the files that were loaded", found="one over others"
            )
    return FileFacts(read.sha256, read.status)


def _difference(file: str, error: ReleaseError) -> Difference:
    return Difference(file, error.expected, error.found)
