"""Reads, one after another on a thread of their own; whoever waits for one waits no longer than he likes.

    loop      call → queue → waits for call.ended, or gives it up: the thread sees that at the next piece
    thread    snapshot → record → HostStore.check → reserve → one copy, the tag over it → publish or abort

Invariant: a slot is reserved, filled, and published or given back on the thread: a call that was given up
never leaves one that somebody still writes into.

Threads: `run`, `forget` and `close` on the loop. The thread owns nothing that outlives a call.
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
from cachemgr.tiers.lmdb_tier.ending import Ending, joined
from cachemgr.tiers.lmdb_tier.errors import LmdbTrouble
from cachemgr.tiers.lmdb_tier.read_call import ReadCall
from cachemgr.tiers.lmdb_tier.record import PIECE_NBYTES, STAMP_NBYTES, keys_of

log = logging.getLogger(__name__)

_SNAPSHOT_BLOCKS = 16
"""Then a new transaction is begun: what was freed since the last one may be used again."""
_HOT_NBYTES = 256 << 10
"""Half of a small second-level cache: the tag reads what was just written."""


_Wanted = tuple[BlockAddress, BlockHash]
"""A block, and its key."""


class Shelf(Protocol):
    """What a reader asks of who has the database open."""

    @property
    def database(self) -> Database | None:
        """None while it is not open."""
        ...

    def found_wrong(self, key: BlockHash, stamp: int) -> None:
        """Its bytes failed their check: it is to be removed."""
        ...

    def used(self, keys: Sequence[BlockHash]) -> None:
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
        self._calls: set[ReadCall] = set()
        self._queue: queue.SimpleQueue[ReadCall | None] = queue.SimpleQueue()
        self._progress_at: float | None = None
        """When the disk last gave something; None while nothing is asked of it."""
        self._over: Ending | None = None
        self._thread = threading.Thread(target=self._run, name="lmdb-reader", daemon=True)

    def start(self) -> None:
        """Begin to read. On the loop."""
        self._over = Ending()
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """True while the disk has given nothing for too long. Ends by itself."""
        since = self._progress_at
        return since is not None and self._clock() - since > self._stuck_s

    async def run(self, call: ReadCall, *, deadline: float) -> int:
        """How many leading blocks it found by its deadline; what is given up ends at its next piece."""
        self._calls.add(call)
        call.ended.add_done_callback(lambda ended: self._calls.discard(call))
        self._queue.put(call)
        try:
            done, _ = await asyncio.wait({call.ended}, timeout=max(0.0, deadline - self._clock()))
        finally:
            call.give_up()
        if not done:
            self._counts.timeouts += 1
        return call.result

    async def forget(self, store: HostStore, *, limit_s: float) -> bool:
        """Give up every call for `store`; False if one does not end in time."""
        calls = [call for call in self._calls if call.store is store]
        for call in calls:
            call.give_up()
        if calls:
            await asyncio.wait({call.ended for call in calls}, timeout=limit_s)
        return all(call.ended.done() for call in calls)

    async def close(self, *, limit_s: float) -> bool:
        """Give up every call and end the thread; False if the disk holds it."""
        self._queue.put(None)
        for call in self._calls:
            call.give_up()
        return self._over is None or (await self._over.wait(limit_s) and joined(self._thread))

    # On the thread.

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            self._progress_at = self._clock()
            if not call.given_up:
                self._serve(call)
            self._progress_at = None
            call.end()
        assert self._over is not None
        self._over.reach()

    def _serve(self, call: ReadCall) -> None:
        database = self._shelf.database
        if database is None:
            return
        try:
            read = self._bring if call.payload else _known
            key = keys_of(call.store.format_id)
            for start in range(0, len(call.blocks), _SNAPSHOT_BLOCKS):
                blocks = call.blocks[start : start + _SNAPSHOT_BLOCKS]
                with database.snapshot() as snapshot:
                    found = read(snapshot, call, [(address, key(address.hash)) for address in blocks])
                call.result += found
                if found < len(blocks):
                    break
        except LmdbTrouble as error:
            self._shelf.trouble(error, database)
        except Exception:
            self._counts.add(failed_calls=1)
            log.exception("reading blocks failed")
        if call.payload and call.result:
            self._shelf.used([key(address.hash) for address in call.blocks[: call.result]])

    def _bring(self, snapshot: Snapshot, call: ReadCall, blocks: Sequence[_Wanted]) -> int:
        for count, wanted in enumerate(blocks):
            if call.given_up or not self._bring_one(snapshot, call, wanted):
                return count
        return len(blocks)

    def _bring_one(self, snapshot: Snapshot, call: ReadCall, wanted: _Wanted) -> bool:
        """False where the call ends."""
        address, key = wanted
        record = snapshot.record(key)
        if record is None:
            self._counts.missing_blocks += 1
            return False
        store, header = call.store, record[STAMP_NBYTES:]
        check = store.check(header, address)
        if check is Verdict.UNREADABLE:
            self._counts.unreadable_blocks += 1
            return False
        if not isinstance(check, ShardCheck):
            self._wrong(key, record)
            return False
        incoming = store.reserve(address)
        if incoming is None:
            self._counts.not_kept_blocks += 1
            return True
        try:
            whole = _fill(snapshot, call, key, incoming, check) and check.passed()
        except BaseException:
            store.abort(incoming)
            raise
        if not whole:
            store.abort(incoming)
            if not call.given_up:
                self._wrong(key, record)
            return False
        self._progress_at = now = self._clock()
        if not call.publish(incoming, header, now=now):
            return False
        self._counts.get_blocks += 1
        self._counts.got_bytes += store.payload_nbytes
        return True

    def _wrong(self, key: BlockHash, record: bytes) -> None:
        self._counts.corrupt_blocks += 1
        self._shelf.found_wrong(key, int.from_bytes(record[:STAMP_NBYTES], "little"))


def _known(snapshot: Snapshot, call: ReadCall, blocks: Sequence[_Wanted]) -> int:
    for count, (_, key) in enumerate(blocks):
        if snapshot.record(key) is None:
            return count
    return len(blocks)


def _fill(
    snapshot: Snapshot, call: ReadCall, key: BlockHash, incoming: IncomingShard, check: ShardCheck
) -> bool:
    """The one copy, from the map into the slot; False if a piece is not there or not of its size."""
    payload = incoming.payload
    slot = np.frombuffer(payload, np.uint8)
    for number, start in enumerate(range(0, payload.nbytes, PIECE_NBYTES)):
        stop = min(start + PIECE_NBYTES, payload.nbytes)
        piece = None if call.given_up else snapshot.piece(key, number)
        if piece is None or len(piece) != stop - start:
            return False
        source = np.frombuffer(piece, np.uint8)
        for at in range(start, stop, _HOT_NBYTES):
            end = min(at + _HOT_NBYTES, stop)
            np.copyto(slot[at:end], source[at - start : end - start])  # without the interpreter's lock
            check.update(payload[at:end])
    return True
