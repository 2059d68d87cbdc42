"""Which arena files a process works on: named, taken over, read, created, deleted within one bound per node.

A name carries cluster, node, layout version, geometry digest and ordinal; `_` separates them because none
may hold it.

The bound covers all arenas of a node together. No lock is needed for that: a creator first declares its size
(ftruncate), then adds up what all declare, and gives way by the excess. Of two that race at least the
second sees both.

Which unlocked arenas give way: those of another geometry or layout only to a process that has none, as far
as it needs their room: the models of a restarted node find their blocks whatever the order they start in.
Those of our own geometry only above the bound; the ones that we may not hold are read.

Threads: called by one thread at a time, never under the cache's lock: this is I/O.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from cachemgr.arena import Arena, ArenaView, create_locked, may_resize, open_locked, open_to_read, resized
from cachemgr.contract import BlockFormat
from cachemgr.settings import CacheSettings, default_bound
from cachemgr.shard import VERSION, geometry_fields, slot_nbytes

log = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"tensorcache_([a-z0-9.-]+)_([a-z0-9.-]+)_v([0-9]+)_([0-9a-f]{16})_([0-9]+)\.arena")
_MAX_ORDINAL = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    ours: bool
    """Of our layout version and geometry."""
    ordinal: int


def geometry_digest(block_format: BlockFormat) -> str:
    """16 hex digits that stand for everything that decides the size and shape of a slot."""
    return blake2b(repr(geometry_fields(block_format)).encode(), digest_size=8).hexdigest()


class ArenaFiles:
    """The arena files of one node and geometry, and how much of the bound is left."""

    def __init__(self, block_format: BlockFormat, settings: CacheSettings) -> None:
        self._format = block_format
        self._settings = settings
        self._geometry = geometry_digest(block_format)
        self._slot_nbytes = slot_nbytes(block_format.payload_nbytes)
        self.held: list[Arena] = []
        self._said: set[str] = set()
        self.bound = self._bound()
        self.capacity = settings.share(self.bound) // self._slot_nbytes
        """Slots this process will ever hold at once."""
        needed, share = self._slot_nbytes, settings.share(self.bound)
        if 0 < share < needed:
            self._say(f"host tier off: one block takes {needed} bytes, this process may hold {share}")

    def claim(self) -> list[Arena]:
        """Take over unlocked arenas of our geometry, delete what must give way, create one if room is left.

        Called at start, and again and again while there is room left.
        """
        if not self.room:
            return []
        taken = self._take_over()
        self._make_room(0 if self.held else self.room * self._slot_nbytes)
        free = min(self.room, (self.bound - self._node_bytes()) // self._slot_nbytes)
        if free * 8 < self.capacity and not self.held:
            self._say(self._waits())
        created = None
        if free * 4 >= self.capacity or (free > 0 and not self.held):  # few slots are not worth another file
            created = self._create(free)
        return [*taken, created] if created else taken

    def let_go_of_lost(self) -> int:
        """Drop the arenas that something which is no cache deleted or cut; how many."""
        lost = 0
        for arena in tuple(self.held):
            if damage := arena.damage():
                log.warning("arena lost: %s was %s while in use; it is replaced", arena.path, damage)
                self._unlink_damaged(arena)  # while it is locked
                arena.let_go()
                self.held.remove(arena)
                lost += 1
        return lost

    def close(self) -> None:
        """Unmap and unlock every arena."""
        for arena in self.held:
            arena.close()
        self.held.clear()

    def others(self) -> set[str]:
        """Paths of this node's arenas of our geometry that we do not hold, whoever does."""
        held = {arena.path for arena in self.held}
        return {entry.path for entry in self._entries() if entry.ours and entry.path not in held}

    def view(self, path: str, *, first_slot: int) -> ArenaView | None:
        """Map another process's arena read-only; None if it cannot be read, is empty or just being made."""
        try:
            fd = open_to_read(path)
        except OSError as error:
            self._say(f"arena refused: {path}: {error}")
            return None
        if fd is None:
            return None
        try:
            view = ArenaView(fd, path=path, block_format=self._format, first_slot=first_slot)
        except (OSError, ValueError):  # ValueError: empty
            return None
        finally:
            os.close(fd)
        return view

    def _make_room(self, wanted: int) -> None:
        """Delete unlocked arenas until `wanted` bytes more keep the bound, ours only if it is exceeded."""
        for entry in self._entries():
            if not entry.ours and self._node_bytes() + wanted > self.bound:
                self._delete_unlocked(entry.path)
        for entry in self._entries():
            if entry.ours and self._node_bytes() > self.bound:
                self._delete_unlocked(entry.path)

    def _take_over(self) -> list[Arena]:
        taken = []
        for entry in self._entries():
            if entry.ours and self.room > 0:
                fd = self._open(entry.path)
                arena = self._adopt(fd, entry.path) if fd is not None else None
                taken += [arena] if arena else []
        return taken

    def _bound(self) -> int:
        if self._settings.host_bytes is not None:
            return self._settings.host_bytes
        try:
            return default_bound(self._settings.directory, held=self._node_bytes())
        except OSError as error:
            self._say(f"host tier off: {self._settings.directory}: {error.strerror}")
            return 0

    @property
    def room(self) -> int:
        """Slots that one more arena of this process may have."""
        return len(self._free_numbers())

    def _free_numbers(self) -> range:
        """The longest stretch of slot numbers that no arena has; all that are left, until one is lost."""
        taken = sorted((arena.slots for arena in self.held), key=lambda slots: slots.start)
        starts = [0, *(slots.stop for slots in taken)]
        stops = [*(slots.start for slots in taken), self.capacity]
        return max(map(range, starts, stops), key=len)

    def _adopt(self, fd: int, path: str) -> Arena | None:
        """Make a locked file an arena of at most our room; None, and the file gone, if that is nothing.

        Only the first one is cut to the room: a later one that does not fit is worth more whole, read-only.
        """
        declared = os.fstat(fd).st_size // self._slot_nbytes
        if declared > self.room and self.held:
            os.close(fd)
            return None
        return self._finish(fd, path, slots=min(declared, self.room))

    def _create(self, slots: int) -> Arena | None:
        for ordinal in range(_MAX_ORDINAL):
            try:
                fd = create_locked(self._path(ordinal))
            except OSError as error:
                self._say(f"host tier off: {self._path(ordinal)}: {error.strerror}")
                return None
            if fd is not None and not may_resize(fd):
                self._discard(fd, self._path(ordinal))  # somebody looks at it: next time
                return None
            if fd is not None:
                os.ftruncate(fd, slots * self._slot_nbytes)
                excess = max(0, self._node_bytes() - self.bound)
                return self._finish(fd, self._path(ordinal), slots=slots - -(-excess // self._slot_nbytes))
        return None

    def _finish(self, fd: int, path: str, *, slots: int) -> Arena | None:
        """Cut the file to `slots`, back all of it by memory, map it; an empty one goes.

        One that must change its size while others have it mapped goes, too: they keep what they mapped.
        """
        try:
            if not self._sized(fd, slots) and not may_resize(fd):
                self._discard(fd, path)
                return None
            if slots > 0:
                os.ftruncate(fd, slots * self._slot_nbytes)
                slots = self._back(fd, slots)
            if slots <= 0:
                self._discard(fd, path)
                return None
            resized(fd)
            first = self._free_numbers().start
            arena = Arena(fd, path=path, block_format=self._format, first_slot=first)
        except OSError as error:
            self._say(f"arena refused: {path}: {error}")
            os.close(fd)
            return None
        self.held.append(arena)
        return arena

    def _sized(self, fd: int, slots: int) -> bool:
        """True if the file is that long and backed already."""
        info = os.fstat(fd)
        return info.st_size == slots * self._slot_nbytes and info.st_blocks * 512 >= info.st_size

    def _back(self, fd: int, slots: int) -> int:
        """Reserve memory for `slots`, fewer if there is not enough; how many it became."""
        asked = slots
        info = os.fstat(fd)
        if info.st_blocks * 512 >= info.st_size:
            return slots
        while slots > 0:
            try:
                os.posix_fallocate(fd, 0, slots * self._slot_nbytes)
                break
            except OSError:
                slots = self._fitting(fd, slots)
                os.ftruncate(fd, slots * self._slot_nbytes)
        if slots < asked:
            got, wanted = slots * self._slot_nbytes, asked * self._slot_nbytes
            self._say(f"host tier shrunk: {self._settings.directory} has room for {got} of {wanted} bytes")
        return slots

    def _fitting(self, fd: int, slots: int) -> int:
        space = os.statvfs(self._settings.directory)
        free = space.f_bavail * space.f_frsize + os.fstat(fd).st_blocks * 512
        return min(slots * 7 // 8, free // self._slot_nbytes)

    def _delete_unlocked(self, path: str) -> None:
        fd = self._open(path)
        if fd is not None:
            self._discard(fd, path)

    def _discard(self, fd: int, path: str) -> None:
        """Delete a file that we locked."""
        with suppress(FileNotFoundError):  # somebody else did
            os.unlink(path)
        os.close(fd)

    def _unlink_damaged(self, arena: Arena) -> None:
        """What is left of a cut file goes: reservations of the old map may still write into it."""
        with suppress(FileNotFoundError):
            info = os.lstat(arena.path)
            if (info.st_dev, info.st_ino) == arena.file_id:  # not what somebody put in its place
                os.unlink(arena.path)

    def _open(self, path: str) -> int | None:
        try:
            return open_locked(path)
        except OSError as error:
            self._say(f"arena refused: {path}: {error}")
            return None

    def _waits(self) -> str:
        """A second model, the process before us in a reload, the release before in a swap: who can tell?"""
        return (
            f"host tier waits: other arenas of this node hold (nearly) all of its {self.bound} bytes until "
            "one of their processes ends (after a swap: at once); if several models serve on this node, set "
            f"arena_bytes to what each may hold (for two: {self.bound // 2})"
        )

    def _say(self, line: str) -> None:
        """Log a line once, however often a waiting process tries."""
        if line not in self._said:
            self._said.add(line)
            log.warning("%s", line)

    def _path(self, ordinal: int) -> str:
        s = self._settings
        name = f"tensorcache_{s.cluster}_{s.node}_v{VERSION}_{self._geometry}_{ordinal}.arena"
        return os.path.join(s.directory, name)

    def _entries(self) -> Iterator[_Entry]:
        """Arena files of this node, lowest ordinal first."""
        node = (self._settings.cluster, self._settings.node)
        found = []
        try:
            names = os.listdir(self._settings.directory)
        except OSError:
            names = []  # creating a file there will fail and say why
        for name in names:
            match = _FILE_NAME.fullmatch(name)
            if match and match.group(1, 2) == node:
                ours = match.group(3, 4) == (str(VERSION), self._geometry)
                found.append(_Entry(os.path.join(self._settings.directory, name), ours, int(match[5])))
        return iter(sorted(found, key=lambda entry: entry.ordinal))

    def _node_bytes(self) -> int:
        """What all arenas of this node declare together."""
        total = 0
        for entry in self._entries():
            try:
                total += os.lstat(entry.path).st_size
            except FileNotFoundError:
                continue  # deleted meanwhile
        return total
