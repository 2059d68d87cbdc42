"""One LMDB environment: the only module that speaks to the library. Records and pieces in, views out.

Invariants
- Opened by the process that uses it: never carried across a fork, never twice in one process (the library
  refuses, as closing one would release the other's locks). Nothing else may open its files, either.
- No transaction of this process is active while the map is resized or closed: see MapGate.
- The library writes with `pwrite`, not through the map: a full disk is an error, not a dead process. Reading
  is through the map, and the interpreter's lock is not held while pages come from the disk.

Threads: any. One write transaction at a time, begun and ended on one thread.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import lmdb

from cachemgr.tiers.lmdb_tier.errors import DiskIsFull, LmdbTrouble, MapIsFull, MustReopen, StoreBroken
from cachemgr.tiers.lmdb_tier.map_gate import MapGate
from cachemgr.tiers.lmdb_tier.record import PAGE_NBYTES, RECORD_NBYTES, piece_key

FIRST_MAP_NBYTES = 64 << 20
_RESIZE_S = 2.0
_BROKEN = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)  # fmt: skip
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except lmdb.MapFullError:
        raise MapIsFull("the map is full") from None
    except lmdb.PanicError as error:
        raise MustReopen(str(error)) from error
    except _BROKEN as error:
        raise StoreBroken(str(error)) from error
    except lmdb.Error as error:
        raise (DiskIsFull if error.code in _NO_SPACE else LmdbTrouble)(str(error)) from error
    except OSError as error:  # TimeoutError of the gate is one, too
        raise LmdbTrouble(str(error)) from error


def _used_nbytes(txn: "lmdb.Transaction[Any]", databases: Sequence[Any]) -> int:
    sizes = [txn.stat(database) for database in databases]
    pages = sum(size["branch_pages"] + size["leaf_pages"] + size["overflow_pages"] for size in sizes)
    return pages * PAGE_NBYTES


class Snapshot:
    """A read transaction: what it gives is valid until it ends."""

    def __init__(self, txn: "lmdb.Transaction[memoryview]", blocks: Any, pieces: Any) -> None:
        self._txn = txn
        self._blocks = blocks
        self._pieces = pieces

    def record(self, key: bytes) -> bytes | None:
        """A copy of the record of a block."""
        found = self._txn.get(key, db=self._blocks)
        return None if found is None else bytes(found)

    def piece(self, key: bytes, number: int) -> memoryview | None:
        """A view of part of a payload in the map, at any alignment."""
        return self._txn.get(piece_key(key, number), db=self._pieces)

    def used_nbytes(self) -> int:
        """See Change."""
        return _used_nbytes(self._txn, (self._blocks, self._pieces))

    def records(self) -> tuple[list[bytes], list[bytes]]:
        """All keys, and the record of each, without payloads. StoreBroken if they are no records of ours."""
        keys: list[bytes] = []
        records: list[bytes] = []
        with self._txn.cursor(db=self._blocks) as cursor:
            for key, record in cursor.iternext():
                keys.append(bytes(key))
                records.append(bytes(record))
        if set(map(len, records)) - {RECORD_NBYTES}:
            raise StoreBroken("its records are of another size")
        return keys, records


class Change:
    """A write transaction: `commit` it, or nothing of it happened."""

    def __init__(self, txn: "lmdb.Transaction[bytes]", blocks: Any, pieces: Any) -> None:
        self._txn = txn
        self._blocks = blocks
        self._pieces = pieces
        self.committed = False

    def used_nbytes(self) -> int:
        """Bytes of the pages that hold something, without what LMDB notes of free ones."""
        with _our_errors():
            return _used_nbytes(self._txn, (self._blocks, self._pieces))

    def record(self, key: bytes) -> bytes | None:
        """The record of a block."""
        with _our_errors():
            return self._txn.get(key, db=self._blocks)

    def put(self, key: bytes, record: bytes, pieces: Sequence[memoryview]) -> None:
        """Keep a block. One copy, from where it lies into the transaction's pages. MapIsFull."""
        with _our_errors():
            for number, piece in enumerate(pieces):
                self._txn.put(piece_key(key, number), piece, db=self._pieces)
            self._txn.put(key, record, db=self._blocks)

    def remove(self, key: bytes) -> None:
        """Let go of a block, with as many pieces as it has. MapIsFull: the tree needs pages for that."""
        with _our_errors():
            self._txn.delete(key, db=self._blocks)
            number = 0
            while self._txn.delete(piece_key(key, number), db=self._pieces):
                number += 1

    def turn(self, nbytes: int) -> None:
        """Write so many bytes that nobody reads, in place of those of before."""
        with _our_errors():
            self._txn.put(b"turn", bytes(nbytes), db=self._pieces)

    def commit(self) -> None:
        """All of it happened when this returns, as far as `sync` goes."""
        with _our_errors():
            self._txn.commit()
        self.committed = True

    def __enter__(self) -> "Change":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.committed:
            self._txn.abort()


class Database:
    """Open from the moment it is made until `close`. `locked=False`: the caller knows that nobody writes."""

    def __init__(
        self, folder: Path, *, map_nbytes: int, writer: bool, locked: bool = True, synced: bool = True
    ) -> None:
        """LmdbTrouble if it cannot be opened; StoreBroken if what is there is not LMDB's."""
        self.gate = MapGate()
        with _our_errors():
            self._env = lmdb.open(
                str(folder), map_size=map_nbytes, readonly=not writer, lock=locked, create=writer, mode=0o700,
                max_dbs=2, max_readers=126, sync=synced, metasync=synced,
            )  # fmt: skip
            try:
                if writer:
                    self._lengthen(folder / "data.mdb")
                self._blocks = self._env.open_db(b"blocks", create=writer)
                self._pieces = self._env.open_db(b"pieces", create=writer)
                if self._env.stat()["psize"] != PAGE_NBYTES:
                    raise StoreBroken("its pages are of another size")
                self.inode = os.stat(folder / "data.mdb").st_ino
            except BaseException:
                self._env.close()
                raise

    @property
    def map_nbytes(self) -> int:
        """The most the file may have by now."""
        return self._env.info()["map_size"]

    @property
    def file_nbytes(self) -> int:
        """What the file has been up to."""
        return (self._env.info()["last_pgno"] + 1) * PAGE_NBYTES

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """What is committed by now. Keep it short: what is freed meanwhile cannot be used again."""
        with _our_errors(), self.gate.using():
            txn = self._begin()
            if txn is not None:
                try:
                    yield Snapshot(txn, self._blocks, self._pieces)
                finally:
                    txn.abort()
                return
        self._follow()
        with _our_errors(), self.gate.using(), self._env.begin(buffers=True) as txn:
            yield Snapshot(txn, self._blocks, self._pieces)

    @contextmanager
    def change(self) -> Iterator[Change]:
        """A write transaction; what is not committed at its end is given up."""
        with self.gate.using():
            with _our_errors():
                txn = self._env.begin(write=True)
            with Change(txn, self._blocks, self._pieces) as change:
                yield change

    def grow(self, map_nbytes: int) -> None:
        """Let the file become so large. LmdbTrouble if a reader does not end."""
        with _our_errors(), self.gate.alone(_RESIZE_S):
            self._env.set_mapsize(map_nbytes)

    def drop_dead_readers(self) -> int:
        """Free the places of readers whose processes are gone; how many there were."""
        with _our_errors():
            return self._env.reader_check()

    def sync(self) -> None:
        """Have the disk hold all that is committed."""
        with _our_errors():
            self._env.sync(True)

    def close(self) -> None:
        """LmdbTrouble, and it stays open, if a reader does not end. Idempotent."""
        with _our_errors(), self.gate.alone(_RESIZE_S):
            self._env.close()

    def _lengthen(self, file: Path) -> None:
        """What was cut off is read as zeros, and so found broken: beyond the end of a file, reading kills."""
        if os.stat(file).st_size < self.file_nbytes:
            try:
                os.truncate(file, self.file_nbytes)
            except OSError as error:
                raise StoreBroken(f"shorter than it says it is: {error.strerror}") from error

    def _begin(self) -> "lmdb.Transaction[memoryview] | None":
        """None if another process made the map larger."""
        try:
            return self._env.begin(buffers=True)
        except lmdb.MapResizedError:
            return None

    def _follow(self) -> None:
        """Make the map as large as the process that writes has it."""
        self.grow(0)
