"""One transaction: what is wrong goes, what the policy picks makes room, what was offered is written.

What lies where in a file at its bound:

    ├── blocks, up to `limit` ──┬── freed by the last two transactions ──┬── this transaction ──┬ tree, gaps ┤

LMDB uses a freed page again two transactions later, and not before every reader from before that has ended.
Where no run of pages is long enough, first the map grows towards its bound, then more is evicted; a
transaction that found no room changed nothing.

Threads: the tier's writer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HeldShard, HostStore
from cachemgr.shard import BlockAddress
from cachemgr.tiers.lmdb_tier.counts import LmdbCounts
from cachemgr.tiers.lmdb_tier.database import Change, Database
from cachemgr.tiers.lmdb_tier.errors import DiskIsFull, LmdbTrouble, MapIsFull
from cachemgr.tiers.lmdb_tier.record import PIECE_NBYTES, STAMP_NBYTES, disk_nbytes, keys_of
from cachemgr.tiers.lmdb_tier.rows import MANY_ROWS, Row, rows_for
from cachemgr.tiers.lmdb_tier.shelf import LmdbShelf

_MOST_GONE = 512
"""Blocks evicted by one transaction, beside those that its own need room for."""
_BALLAST_NBYTES = 64 << 10
"""Written anew by each transaction: so there are free pages to remove a block with once the disk is full."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A block that waits to be written."""

    store: HostStore
    address: BlockAddress
    key: BlockHash


@dataclass(frozen=True, slots=True)
class _Held:
    store: HostStore
    shard: HeldShard
    key: BlockHash


class Batches:
    """Writes one after another."""

    def __init__(
        self,
        shelf: LmdbShelf,
        counts: LmdbCounts,
        *,
        batch_nbytes: int,
        retry_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._shelf = shelf
        self._counts = counts
        self.batch_nbytes = min(batch_nbytes, shelf.bound // 16)
        self._limit = shelf.bound - 3 * self.batch_nbytes - shelf.bound // 32 - (256 << 10)
        self._slack = 0
        """What is left free beside that since the map was found full."""
        self._retry_s = 12 * retry_s
        self._clock = clock
        self._file_limit = 0
        self._file_until = 0.0
        """The disk was full: until then, blocks have no more than `_file_limit`."""

    def write(self, offers: Sequence[Offer], *, released: Callable[[], None]) -> None:
        """Write what is new of `offers`; `released`: their stores are not used any more.

        LmdbTrouble, and all of it is dropped, if the disk refuses.
        """
        shelf = self._shelf
        fresh = list({offer.key: offer for offer in offers if offer.key not in shelf.rows}.values())
        known = [offer.key for offer in offers if offer.key in shelf.rows]
        self._counts.add(put_known=len(known))
        shelf.used(known)
        shelf.use_noted()
        held = self._hold(fresh)
        count = 0
        try:
            held = self._admitted(held)
            count = len(held)
            self._widen(held)
            removed = self._remove_wrong()
            if held:
                self._write(held, released)
            if count or removed:
                shelf.write_succeeded()
        except DiskIsFull:
            self._counts.add(put_dropped=count)
            self._stay_within_file()
            raise
        except LmdbTrouble:
            self._counts.add(put_dropped=count)
            raise
        finally:
            _let_go(held)
            released()

    def _hold(self, offers: Sequence[Offer]) -> list[_Held]:
        """Pin what is still there, store by store, as far as it can ever be kept."""
        held: list[_Held] = []
        for store in {id(offer.store): offer.store for offer in offers}.values():
            names = [offer.address.hash for offer in offers if offer.store is store]
            if disk_nbytes(store.payload_nbytes) > self._limit // 4:
                self._counts.add(put_dropped=len(names))
                continue
            key = keys_of(store.format_id)
            shards = [shard for shard in store.hold(names) if shard is not None]
            held += [_Held(store, shard, key(shard.address.hash)) for shard in shards]
            self._counts.put_gone += len(names) - len(shards)
        return held

    def _admitted(self, held: list[_Held]) -> list[_Held]:
        """Where there is no room left: those that the policy takes to be worth what goes for them."""
        need = sum(disk_nbytes(one.store.payload_nbytes) for one in held)
        if self._shelf.used_nbytes + need <= self._room():
            return held
        rows = self._shelf.rows
        refused: dict[BlockHash, _Held] = {}
        for one in held:
            row = _row(one, 0)
            if row.parent in refused:
                rows.policy.decline(row.key, depth=row.depth)
                refused[one.key] = one
            elif not rows.policy.admits(row.key, depth=row.depth, parent=rows.number(row.parent)):
                refused[one.key] = one
        self._counts.put_declined += len(refused)
        _let_go(list(refused.values()))
        return [one for one in held if one.key not in refused]

    def _widen(self, held: Sequence[_Held]) -> None:
        """Have rows for these, in a table for as many blocks as fit the bound, or half way there."""
        rows = self._shelf.rows
        if held:
            smallest = min(one.store.payload_nbytes for one in held)
            double = 2 * rows.capacity if rows.free < len(held) else 0
            wanted = rows_for(self._shelf.bound, payload_nbytes=smallest, enough=max(double, MANY_ROWS))
            if max(wanted, len(held)) > rows.capacity:
                self._shelf.rows = rows.widen(max(wanted, len(held)))

    def _remove_wrong(self) -> bool:
        wrong = self._shelf.take_wrong()
        gone = [block for key, stamp in wrong if (block := self._shelf.rows.drop(key, stamp)) is not None]
        if not gone:
            return False
        try:
            with self._database().change() as change:
                _remove(change, gone)
                used_nbytes = change.used_nbytes()
                change.commit()
        except LmdbTrouble:
            self._shelf.rows.restore(gone)  # found again, and wrong again
            raise
        self._shelf.used_nbytes = used_nbytes
        self._counts.removed_blocks += len(gone)
        return True

    def _write(self, held: list[_Held], released: Callable[[], None]) -> None:
        """One transaction, begun again while that helps."""
        made_room = False
        while True:
            try:
                self._try(held, released)
                break
            except MapIsFull:
                self._counts.map_full += 1
                if not held:  # found at the commit
                    raise
                if self._grow():
                    continue
                if made_room or not self._make_more_room():
                    raise
                made_room = True
        self._counts.batches += 1
        self._slack = max(0, self._slack - self.batch_nbytes // 64)

    def _try(self, held: list[_Held], released: Callable[[], None]) -> None:
        shelf = self._shelf
        need = sum(disk_nbytes(one.store.payload_nbytes) for one in held)
        stamp = shelf.stamp + 1
        written = [_row(one, stamp) for one in held]
        gone: list[Row] = []
        try:
            with self._database().change() as change:
                gone = self._evict(change, need, rows=len(held), most=_MOST_GONE + 2 * len(held))
                _put(change, held, stamp)
                change.turn(_BALLAST_NBYTES)
                used_nbytes = change.used_nbytes()
                _let_go(held)
                released()
                change.commit()
        except BaseException:
            shelf.rows.restore(gone)
            raise
        shelf.stamp, shelf.used_nbytes = stamp, used_nbytes
        self._counts.evicted_blocks += len(gone)
        self._counts.put_blocks += len(written)
        for row in written:
            self._counts.put_bytes += row.payload_nbytes
            shelf.rows.enter(row)

    def _evict(self, change: Change, need: int, *, rows: int, most: int) -> list[Row]:
        """Remove what goes for `need` bytes."""
        too_much = change.used_nbytes() + need - self._room()
        gone = self._shelf.rows.make_room(too_much, rows=rows, most=most)
        try:
            _remove(change, gone)
        except LmdbTrouble:
            self._shelf.rows.restore(gone)
            raise
        return gone

    def _room(self) -> int:
        """Bytes that blocks may have now."""
        room = self._limit - self._slack
        return min(room, self._file_limit) if self._clock() < self._file_until else room

    def _stay_within_file(self) -> None:
        """The file may not grow: for a minute (of 5 s of `retry_s`), what is freed in it has to do."""
        room = self._database().file_nbytes - 4 * self.batch_nbytes
        self._file_limit = max(room, 2 * self.batch_nbytes)
        self._file_until = self._clock() + self._retry_s
        self._evict_alone(most=1)  # what one leaves is what removing more needs
        self._evict_alone(most=_MOST_GONE)

    def _grow(self) -> bool:
        """Let the map grow a step; False if it is as large as it may be."""
        database = self._database()
        if database.map_nbytes >= self._shelf.bound:
            return False
        database.grow(min(self._shelf.bound, 2 * database.map_nbytes))
        self._shelf.map_nbytes = database.map_nbytes
        self._counts.map_growths += 1
        return True

    def _make_more_room(self) -> bool:
        """Evict a batch more than the bound asks for; False if that did not help before: readers hold on."""
        dead = self._database().drop_dead_readers()
        self._counts.dead_readers += dead
        if self._slack > self._limit // 4:
            return dead > 0
        self._slack += self.batch_nbytes
        self._evict_alone(most=_MOST_GONE)
        return True

    def _evict_alone(self, *, most: int) -> None:
        """Make room for a batch that can be used by the next transaction."""
        with self._database().change() as change:
            gone = self._evict(change, self.batch_nbytes, rows=0, most=most)
            try:
                used_nbytes = change.used_nbytes()
                change.commit()
            except BaseException:
                self._shelf.rows.restore(gone)
                raise
        self._shelf.used_nbytes = used_nbytes
        self._counts.evicted_blocks += len(gone)
        for nbytes in (1, 2):  # a transaction that changes nothing is none, and frees no pages
            with self._database().change() as change:
                change.turn(nbytes)
                change.commit()

    def _database(self) -> Database:
        database = self._shelf.database
        if database is None:
            raise LmdbTrouble("it is not open")
        return database


def _row(one: _Held, stamp: int) -> Row:
    """What is known of it once it is written."""
    address = one.shard.address
    parent = keys_of(one.store.format_id)(address.parent)
    return Row(one.key, address.index, one.store.payload_nbytes, stamp, parent)


def _put(change: Change, held: Sequence[_Held], stamp: int) -> None:
    for one in held:
        payload = one.shard.payload
        pieces = [payload[start : start + PIECE_NBYTES] for start in range(0, payload.nbytes, PIECE_NBYTES)]
        record = stamp.to_bytes(STAMP_NBYTES, "little") + one.shard.header
        change.put(one.key, record, pieces)


def _remove(change: Change, gone: Sequence[Row]) -> None:
    for block in gone:
        change.remove(block.key)


def _let_go(held: list[_Held]) -> None:
    """Unpin all; idempotent."""
    for store in {id(one.store): one.store for one in held}.values():
        store.let_go([one.shard for one in held if one.store is store])
    held.clear()
