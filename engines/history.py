"""What was current before, and until when: a line per switch, on disk before the switch itself.

    <version>/history     2026-11-29T17:20:03Z 9f86d081884c7d65…     until then this release was current

Invariants
- A line names the release that `current` named when a switch began, never the one it was to name: a switch
  that was killed halfway adds no release that never served (the same one twice in a row counts once).
- Lines are only appended, by the holder of the publisher lock. A torn one (power cut, full disk) is ended by
  the next append and skipped by every reader.
- It proposes, it proves nothing: a release that is found through it passes the whole load chain before it
  becomes current.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engines.errors import ReleaseError
from engines.version_folder import sync_folder

HISTORY = "history"
_TAIL_BYTES = 1 << 18
"""As much as is read, from the end: some three thousand switches."""
_LINE = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Served:
    """`digest` was current until `until` (seconds since 1970)."""

    digest: str
    until: float


def read_history(version_dir: Path) -> tuple[Served, ...]:
    """What was current before, oldest first; empty if nothing was. ReleaseError if the file is none."""
    try:
        with _opened(version_dir / HISTORY, os.O_RDONLY) as (fd, size):
            data = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ReleaseError(
            "history", expected=f"a readable file {version_dir / HISTORY}", found=_reason(error)
        ) from None
    lines = (_parse(line) for line in data.split(b"\n"))
    return tuple(line for line in lines if line is not None)


def append_history(version_dir: Path, served: Served) -> None:
    """Put one line on disk. OSError leaves the file as it was. Only the holder of the lock may."""
    at = datetime.fromtimestamp(served.until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    line = f"{at} {served.digest}\n".encode()
    with _opened(version_dir / HISTORY, os.O_RDWR | os.O_APPEND | os.O_CREAT) as (fd, size):
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # what was torn ends here
        try:
            while line:
                line = line[os.write(fd, line) :]
            os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
            raise
    if size == 0:
        sync_folder(version_dir)


def previous_release(history: Sequence[Served], current: str | None) -> str | None:
    """The last release that was current before `current`; None if no other ever was."""
    others = (served.digest for served in reversed(history) if served.digest != current)
    return next(others, None)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[tuple[int, int]]:
    """Descriptor and size; OSError unless `path` is a regular file (O_NONBLOCK: a FIFO must not block us)."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield fd, status.st_size
    except OSError as error:  # a failed write does not say where
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def _parse(line: bytes) -> Served | None:
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    try:
        until = datetime.strptime(match[1].decode(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:  # the 31st of February
        return None
    return Served(match[2].decode(), until.timestamp())


def _reason(error: OSError) -> str:
    return "a symlink" if error.errno == errno.ELOOP else error.strerror or str(error)
