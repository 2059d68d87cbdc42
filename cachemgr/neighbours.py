"""Keeps track of the arenas that other processes of this node write, and of what they publish there.

A view maps the file read-only. A scan copies every header in one vectorised pass, compares tags (each
publication has its own) with those of the scan before, and hands only what changed to the residence.

Invariants
- A view lives as long as its file has its name and is not our own; then its blocks are forgotten and the
  map goes with its last reader.
- Nothing here writes to a foreign arena.

Threads: one tends (`tend`, `close`), without the cache's lock; `views` is read by any.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cachemgr.arena import ArenaView
from cachemgr.arena_files import ArenaFiles
from cachemgr.contract import BlockHash
from cachemgr.foreign import FIRST_FOREIGN_SLOT
from cachemgr.residence import Residence
from cachemgr.shard import ShardOpener

log = logging.getLogger(__name__)

_AT_ONCE = 128  # the residence takes so many under one hold of its lock
_FileId = tuple[int, int]


@dataclass(slots=True)
class _Neighbour:
    arena: ArenaView
    tags: npt.NDArray[np.uint64] = field(init=False)
    """[slots, 2]; zeros where nothing readable is published."""
    names: npt.NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.tags = np.zeros((len(self.arena.slots), 2), np.uint64)
        self.names = np.zeros(len(self.arena.slots), "V16")


class Neighbours:
    """The foreign arenas of one cache."""

    def __init__(self, files: ArenaFiles, *, opener: ShardOpener, residence: Residence) -> None:
        self._files = files
        self._opener = opener
        self._residence = residence
        self._known: dict[tuple[str, _FileId], _Neighbour] = {}
        self._next_slot = FIRST_FOREIGN_SLOT
        self.views: tuple[ArenaView, ...] = ()
        """What is mapped now; replaced as a whole."""

    def tend(self, *, scan: bool) -> None:
        """Let go of arenas that are gone or ours by now, map new ones; `scan`: read all headers again."""
        present = {(path, file_id) for path in self._files.others() if (file_id := _file_id(path))}
        for key in self._known.keys() - present:
            self._drop(key)
        new = [neighbour for key in sorted(present - self._known.keys()) if (neighbour := self._map(key))]
        for neighbour in list(self._known.values()) if scan else new:
            self._scan(neighbour)

    def close(self) -> None:
        """Unmap everything that nobody reads at this moment. The residence forgets by itself."""
        self._known.clear()
        self.views = ()

    def _map(self, key: tuple[str, _FileId]) -> _Neighbour | None:
        path, file_id = key
        arena = self._files.view(path, first_slot=self._next_slot)
        if arena is None or arena.file_id != file_id:  # replaced since we looked: the next round sees it
            return None
        self._next_slot = arena.slots.stop
        self._known[key] = neighbour = _Neighbour(arena)
        self._publish_views()
        log.info("host tier: %s: %d slots of another process are read", path, len(arena.slots))
        return neighbour

    def _drop(self, key: tuple[str, _FileId]) -> None:
        neighbour = self._known.pop(key)
        self._publish_views()
        for part in _entries(neighbour, np.flatnonzero(neighbour.tags.any(axis=1))):
            self._residence.forget_foreign(part)

    def _publish_views(self) -> None:
        self.views = tuple(neighbour.arena for neighbour in self._known.values())

    def _scan(self, neighbour: _Neighbour) -> None:
        """Tell the residence what changed since the last scan."""
        if not neighbour.arena.whole():
            return  # cut by something that is no cache: each read of it is a miss as well
        headers = neighbour.arena.headers()
        tags = np.ascontiguousarray(headers["tag"]).view("<u8").reshape(-1, 2)
        tags[~self._opener.readable(headers)] = 0
        changed = np.flatnonzero((tags != neighbour.tags).any(axis=1))
        if not len(changed):
            return
        for part in _entries(neighbour, changed[neighbour.tags[changed].any(axis=1)]):
            self._residence.forget_foreign(part)
        neighbour.tags = tags
        neighbour.names[changed] = headers["hash"][changed]
        for part in _entries(neighbour, changed[tags[changed].any(axis=1)]):
            self._residence.add_foreign(part)


def _entries(neighbour: _Neighbour, rows: npt.NDArray[np.intp]) -> Iterator[Sequence[tuple[BlockHash, int]]]:
    """(name, slot) of `rows`, a few at a time: the step loop must not wait for a long conversion."""
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        names: list[BlockHash] = neighbour.names[part].tolist()
        slots: list[int] = (neighbour.arena.slots.start + part).tolist()
        yield list(zip(names, slots, strict=True))


def _file_id(path: str) -> _FileId | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino
