"""Keeps track of the arenas that other processes of this node write, and of what they publish there.

A view maps the file read-only. A scan copies every header in one vectorised pass, compares tags (each
publication has its own) with those of the scan before, and hands only what changed to the slot table.

Invariants
- A view lives as long as its file has its name, keeps its size and is not our own; then its blocks are
  forgotten and the map goes with its last reader.
- Nothing here writes to an arena of others.

Threads: `refresh` and `close` by one, without the cache's lock; `views` is read by any.
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
from cachemgr.other_blocks import FIRST_OTHER_SLOT
from cachemgr.shard import ShardOpener
from cachemgr.slot_table import SlotTable

log = logging.getLogger(__name__)

_AT_ONCE = 64  # the slot table takes so many under one hold of its lock
_FileId = tuple[int, int]


@dataclass(slots=True)
class _OtherArena:
    arena: ArenaView
    tags: npt.NDArray[np.uint64] = field(init=False)
    """[slots, 2]; zeros where nothing readable is published."""
    names: npt.NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.tags = np.zeros((len(self.arena.slots), 2), np.uint64)
        self.names = np.zeros(len(self.arena.slots), "V16")


class OtherArenas:
    """The arenas of others, for one cache."""

    def __init__(self, files: ArenaFiles, *, opener: ShardOpener, table: SlotTable) -> None:
        self._files = files
        self._opener = opener
        self._table = table
        self._known: dict[tuple[str, _FileId], _OtherArena] = {}
        self._next_slot = FIRST_OTHER_SLOT
        self.views: tuple[ArenaView, ...] = ()
        """What is mapped now; replaced as a whole."""

    def refresh(self, *, scan: bool) -> None:
        """Let go of arenas that are gone or ours by now, map new ones; `scan`: read all headers again."""
        present = {(path, file_id) for path in self._files.others() if (file_id := _file_id(path))}
        for key in [
            key for key, other in self._known.items() if key not in present or not other.arena.whole()
        ]:
            self._drop(key)  # of a file that was cut, what is left is mapped again
        new = [other for key in sorted(present - self._known.keys()) if (other := self._map(key))]
        for other in list(self._known.values()) if scan else new:
            self._scan(other)

    def close(self) -> None:
        """Unmap everything that nobody reads at this moment. The slot table forgets by itself."""
        self._known.clear()
        self.views = ()

    def _map(self, key: tuple[str, _FileId]) -> _OtherArena | None:
        path, file_id = key
        arena = self._files.view(path, first_slot=self._next_slot)
        if arena is None or arena.file_id != file_id:  # replaced since we looked: the next round sees it
            return None
        self._next_slot = arena.slots.stop
        self._known[key] = other = _OtherArena(arena)
        self._publish_views()
        log.info("host tier: %s: %d slots of another process are read", path, len(arena.slots))
        return other

    def _drop(self, key: tuple[str, _FileId]) -> None:
        other = self._known.pop(key)
        self._publish_views()
        for part in _entries(other, np.flatnonzero(other.tags.any(axis=1))):
            self._table.forget_others(part)

    def _publish_views(self) -> None:
        self.views = tuple(other.arena for other in self._known.values())

    def _scan(self, other: _OtherArena) -> None:
        """Tell the slot table what changed since the last scan."""
        if not other.arena.whole():
            return  # cut by something that is no cache: each read of it is a miss as well
        headers = other.arena.headers()
        tags = np.ascontiguousarray(headers["tag"]).view("<u8").reshape(-1, 2)
        tags[~self._opener.readable(headers)] = 0
        changed = np.flatnonzero((tags != other.tags).any(axis=1))
        if not len(changed):
            return
        for part in _entries(other, changed[other.tags[changed].any(axis=1)]):
            self._table.forget_others(part)
        other.tags = tags
        other.names[changed] = headers["hash"][changed]
        for part in _entries(other, changed[tags[changed].any(axis=1)]):
            self._table.add_others(part)


def _entries(other: _OtherArena, rows: npt.NDArray[np.intp]) -> Iterator[Sequence[tuple[BlockHash, int]]]:
    """(name, slot) of `rows`, a few at a time: the step loop must not wait for a long conversion."""
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        names: list[BlockHash] = other.names[part].tolist()
        slots: list[int] = (other.arena.slots.start + part).tolist()
        yield list(zip(names, slots, strict=True))


def _file_id(path: str) -> _FileId | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino
