"""Keeps a node's rings on disk, so that it starts with what it knew last.

Invariants: the file is whole, old or new, whenever the process or the machine dies. One process of a node
writes it at a time, any may read. A file that is not whole (it came from elsewhere) is as good as none.
"""

import contextlib
import logging
import math
import os
import secrets
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from cachemgr.errors import one_line
from cachemgr.ring.errors import RingError
from cachemgr.ring.state import MAX_NBYTES, RingState

_log = logging.getLogger(__name__)
MAX_EARLIER = 4
_MAX_FILE_NBYTES = (1 + MAX_EARLIER) * MAX_NBYTES + 1024


class ReplacedRing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ring that is not in force any more; `at`: time.time() of its replacement."""

    state: RingState
    at: float

    def __post_init__(self) -> None:
        _require_time("at", self.at)


class KeptRings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node remembers of the ring over a restart.

    earlier      those before `current` whose owners may still have what was not moved, the latest first
    changed_at   time.time() at which `current` came into force
    pulled       this node has all that `current` gave it
    """

    current: RingState
    earlier: Annotated[tuple[ReplacedRing, ...], msgspec.Meta(max_length=MAX_EARLIER)]
    changed_at: float
    pulled: bool

    def __post_init__(self) -> None:
        _require_time("changed_at", self.changed_at)


class RingFile:
    """`ring.json` of a node. Its folder is made when it is first needed."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def load(self) -> KeptRings | None:
        """What was saved last; None, and a line in the log, if there is nothing or it cannot be used."""
        try:
            return msgspec.json.decode(self._read(), type=KeptRings)
        except FileNotFoundError:
            _log.info("%s: no ring is kept yet", self._path)
        except OSError as error:
            _log.warning("%s: the ring kept there cannot be read (%s)", self._path, error.strerror)
        except (RingError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.warning("%s: not a kept ring, ignored (%s)", self._path, one_line(error))
        return None

    def save(self, rings: KeptRings) -> None:
        """Replace what is kept; RingError if it cannot be written, and what was kept is kept still."""
        scratch = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()
            try:
                _write(scratch, msgspec.json.encode(rings, order="sorted"))
                os.rename(scratch, self._path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    scratch.unlink()
                raise
            _sync_folder(self._path.parent)
        except OSError as error:
            raise RingError("ring file", f"cannot be written ({error.strerror})", str(self._path)) from None

    def _read(self) -> bytes:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise RingError("ring file", "must be a regular file", str(self._path))
            if info.st_size > _MAX_FILE_NBYTES:
                raise RingError("ring file", f"must be at most {_MAX_FILE_NBYTES} bytes", info.st_size)
            return file.read(_MAX_FILE_NBYTES)

    def _sweep(self) -> None:
        """Delete what a killed `save` left."""
        for scratch in self._path.parent.glob(f".{self._path.name}.*"):
            with contextlib.suppress(OSError):
                scratch.unlink()


def _write(path: Path, data: bytes) -> None:
    """A new file with `data`, on disk when this returns."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_time(field: str, value: float) -> None:
    if not math.isfinite(value):
        raise RingError(field, "must be seconds since 1970", value)
