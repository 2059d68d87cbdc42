"""Reads blocks where a peer on this host has them: maps its arena, copies piece by piece, checks each piece
hot.

Whether a peer is on this host is found by opening the file it names: same path, device and inode, owner and
mode those of an arena of ours. What is read that way may change at any moment, lease or not: identity and
tag are checked on the copy, so a torn read is a miss.

Invariants: a map is used only while the file has its size; a place outside of the file is refused before it
is touched; at most a few files stay mapped, the one used longest ago goes first.
Threads: the IO thread.
"""

import mmap
import os
from collections import OrderedDict

from cachemgr.arena import open_to_read
from cachemgr.cluster.bulk.incoming import PIECE_NBYTES, IncomingBlock, Outcome
from cachemgr.cluster.bulk.messages import PlacedFile
from cachemgr.host_contract import HostStore
from cachemgr.shard import ALIGN, HEADER_NBYTES, BlockAddress

_MAPPED = 16
_SUFFIX = ".arena"


class PeerArena:
    """An arena file of another process, mapped to read, until its last user drops it."""

    def __init__(self, fd: int) -> None:
        self._nbytes = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self._nbytes, access=mmap.ACCESS_READ)  # keeps a duplicate, and its lock
        self._view = memoryview(self._map)

    def shard(self, offset: int, nbytes: int) -> memoryview | None:
        """`nbytes` from `offset`; None if that is no place in the file, or the file was cut."""
        if offset % ALIGN or offset + nbytes > self._nbytes or self._map.size() < self._nbytes:
            return None
        return self._view[offset : offset + nbytes]


class PeerArenas:
    """The arenas of one peer that this process has mapped."""

    def __init__(self) -> None:
        self._mapped: OrderedDict[PlacedFile, PeerArena] = OrderedDict()

    def open(self, file: PlacedFile) -> PeerArena | None:
        """The arena; None if it cannot be read here: another host, another user, another file of that
        name.
        """
        arena = self._mapped.get(file)
        if arena is not None:
            self._mapped.move_to_end(file)
            return arena
        arena = _open(file)
        if arena is not None:
            while len(self._mapped) >= _MAPPED:
                self._mapped.popitem(last=False)
            self._mapped[file] = arena
        return arena

    def close(self) -> None:
        """Let go of all."""
        self._mapped.clear()


def bring(store: HostStore, address: BlockAddress, shard: memoryview) -> Outcome:
    """Copy a shard (header, payload) that lies elsewhere into a slot of `store`, and publish it if it passes.

    One that changed while it was read is not kept; nobody is to blame for that.
    """
    header = bytes(shard[:HEADER_NBYTES])
    block = IncomingBlock(store, address, header)
    at = HEADER_NBYTES
    while block.kept and block.missing:
        room = block.room(PIECE_NBYTES)
        room[:] = shard[at : at + len(room)]
        at += len(room)
        block.advance(len(room))
    outcome = block.finish()
    if outcome in (Outcome.FOREIGN, Outcome.CORRUPT) and shard[:HEADER_NBYTES] != header:
        return Outcome.NOT_KEPT
    return outcome


def _open(file: PlacedFile) -> PeerArena | None:
    if not file.path.endswith(_SUFFIX) or not os.path.isabs(file.path):
        return None
    try:
        fd = open_to_read(file.path)
    except (OSError, ValueError):  # no arena, not of this user, or no path at all
        return None
    if fd is None:
        return None
    try:
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) != (file.device, file.inode) or not info.st_size:
            return None
        return PeerArena(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
