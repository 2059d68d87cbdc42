"""Reads on threads of their own; whoever waits for one waits no longer than he likes.

    loop       call → queue → waits for call.ended, or gives it up: the threads see that at the next piece
    threads    snapshot → record → HostStore.check → reserve → one copy, the tag over it → publish or abort

Two threads serve one call together: the copy and the tag run without the interpreter's lock, what is between
them does not, and a disk likes to be asked for two things at once.

Invariant: a slot is reserved, filled, and published or given back on one thread: a call that was given up
never leaves one that somebody still writes into.

Threads: `run`, `forget` and `close` on the loop. The threads own nothing that outlives a call.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore, IncomingShard
from cachemgr.shard import BlockAddress, ShardCheck, Verdict
from cachemgr.tiers.lmdb_tier.counts import LmdbCounts
from cachemgr.tiers.lmdb_tier.database import Database, Snapshot
from cachemgr.tiers.lmdb_tier.errors import LmdbTrouble
from cachemgr.tiers.lmdb_tier.read_call import ReadCall
from cachemgr.tiers.lmdb_tier.record import PIECE_NBYTES, RECORD_NBYTES, STAMP_NBYTES

log = logging.getLogger(__name__)

_THREADS = 2
_SHARED_BLOCKS = 4
"""A call for fewer is served by one thread."""
_SNAPSHOT_BLOCKS = 16
"""Then a new transaction is begun: what was freed since the last one may be used again."""
_HOT_NBYTES = 256 << 10
"""Half of a small second-level cache: the tag reads what was just written."""


class Shelf(Protocol):
    """What a reader asks of who has the database open."""

    @property
    def database(self) -> Database | None:
        """None while it is not open."""
        ...

    def found_wrong(self, name: BlockHash, stamp: int) -> None:
        """Its bytes failed their check: it is to be removed."""
        ...

    def used(self, names: Sequence[BlockHash]) -> None:
        """Blocks of a chain, from its front, were read."""
        ...

    def trouble(self, error: LmdbTrouble, database: Database) -> None:
        """`database` could not be read."""
        ...


class Reader:
    """`start` it once, `close` it once."""

    def __init__(
        self, shelf: Shelf, counts: LmdbCounts, *, stuck_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shelf = shelf
        self._counts = counts
        self._stuck_s = stuck_s
        self._clock = clock
        self._counting = threading.Lock()
        self._calls: set[ReadCall] = set()
        self._queue: queue.SimpleQueue[ReadCall | None] = queue.SimpleQueue()
        self._progress_at: list[float | None] = [None] * _THREADS
        """Of each thread: when it last had something from the disk; None while it rests."""
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"lmdb-reader-{number}", daemon=True)
            for number in range(_THREADS)
        ]

    def start(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    @property
    def stuck(self) -> bool:
        """True while a thread has waited for the disk for too long. Ends by itself."""
        oldest = self._clock() - self._stuck_s
        return any(since is not None and since < oldest for since in self._progress_at)

    async def run(self, call: ReadCall, *, blocks: int, deadline: float) -> int:
        """How many leading blocks it found by its deadline; what is given up ends at its next piece."""
        self._calls.add(call)
        call.ended.add_done_callback(lambda ended: self._calls.discard(call))
        for _ in range(_THREADS if call.payload and blocks >= _SHARED_BLOCKS else 1):
            self._queue.put(call)
        try:
            done, _ = await asyncio.wait({call.ended}, timeout=max(0.0, deadline - self._clock()))
        finally:
            call.given_up = True
        if not done:
            self._counts.timeouts += 1
        return call.taken

    async def forget(self, store: HostStore, *, limit_s: float) -> bool:
        """Give up every call for `store`; False if one does not end in time."""
        return await self._give_up([call for call in self._calls if call.store is store], limit_s)

    async def close(self, *, limit_s: float) -> bool:
        """Give up every call and end the threads; False if the disk holds one."""
        calls = list(self._calls)
        for _ in self._threads:
            self._queue.put(None)
        if not await self._give_up(calls, limit_s):
            return False
        for thread in self._threads:
            await asyncio.to_thread(thread.join, limit_s)
        return not any(thread.is_alive() for thread in self._threads)

    async def _give_up(self, calls: Sequence[ReadCall], limit_s: float) -> bool:
        for call in calls:
            call.given_up = True
        if calls:
            await asyncio.wait({call.ended for call in calls}, timeout=limit_s)
        return all(call.ended.done() for call in calls)

    # On the threads.

    def _run(self, number: int) -> None:
        while (call := self._queue.get()) is not None:
            if call.enter():
                self._progress_at[number] = self._clock()
                self._serve(call, number)
                self._progress_at[number] = None
                if call.leave():
                    self._end(call)
            elif call.idle:
                call.end()

    def _end(self, call: ReadCall) -> None:
        if call.payload:
            with self._counting:
                self._counts.missing_blocks += call.missed
            self._shelf.used(call.names)
        call.end()

    def _serve(self, call: ReadCall, number: int) -> None:
        database = self._shelf.database
        try:
            while database is not None:
                with database.snapshot() as snapshot:
                    if not self._read_some(snapshot, call, number):
                        return
        except LmdbTrouble as error:
            assert database is not None
            self._shelf.trouble(error, database)
        except Exception:
            self._counts.failed_calls += 1
            log.exception("reading blocks failed")
        call.stop()

    def _read_some(self, snapshot: Snapshot, call: ReadCall, number: int) -> bool:
        """False once there is nothing left to take."""
        for _ in range(_SNAPSHOT_BLOCKS):
            found = call.take(snapshot.record)
            if found is None:
                return False
            if call.payload and not self._bring(snapshot, call, found):
                call.stop()
                return False
            self._progress_at[number] = self._clock()
        return True

    def _bring(self, snapshot: Snapshot, call: ReadCall, found: tuple[BlockAddress, bytes]) -> bool:
        """False where the call ends."""
        address, record = found
        store, header = call.store, record[STAMP_NBYTES:]
        check = store.check(header, address) if len(record) == RECORD_NBYTES else Verdict.CORRUPT
        if check is Verdict.UNREADABLE:
            with self._counting:
                self._counts.unreadable_blocks += 1
            return False
        if not isinstance(check, ShardCheck):
            self._wrong(address, record)
            return False
        incoming = store.reserve(address)
        if incoming is None:
            return True
        try:
            whole = _fill(snapshot, call, incoming, check)
        except BaseException:
            store.abort(incoming)
            raise
        if not whole or not check.passed():
            store.abort(incoming)
            if not call.given_up:
                self._wrong(address, record)
            return False
        store.publish(incoming, header)
        with self._counting:
            self._counts.get_blocks += 1
            self._counts.got_bytes += store.payload_nbytes
        call.came(store.payload_nbytes, self._clock())
        return True

    def _wrong(self, address: BlockAddress, record: bytes) -> None:
        with self._counting:
            self._counts.corrupt_blocks += 1
        self._shelf.found_wrong(address.hash, int.from_bytes(record[:STAMP_NBYTES], "little"))


def _fill(snapshot: Snapshot, call: ReadCall, incoming: IncomingShard, check: ShardCheck) -> bool:
    """The one copy, from the map into the slot; False if a piece is not there or not of its size."""
    payload, name = incoming.payload, incoming.address.hash
    slot = np.frombuffer(payload, np.uint8)
    for number, start in enumerate(range(0, payload.nbytes, PIECE_NBYTES)):
        stop = min(start + PIECE_NBYTES, payload.nbytes)
        piece = None if call.given_up else snapshot.piece(name, number)
        if piece is None or len(piece) != stop - start:
            return False
        source = np.frombuffer(piece, np.uint8)
        for at in range(start, stop, _HOT_NBYTES):
            end = min(at + _HOT_NBYTES, stop)
            np.copyto(slot[at:end], source[at - start : end - start])  # without the interpreter's lock
            check.update(payload[at:end])
    return True
