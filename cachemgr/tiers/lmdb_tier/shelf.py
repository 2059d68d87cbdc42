"""The folder and the database as this process has them: who writes, opening, trouble, taking over.

    closed ──▶ writer     this process holds writer.lock, has rows, writes and evicts
       ▲  └──▶ reader     another process writes (or nobody may): looks into the database itself
       └────── trouble    said once, counted, tried again after `retry_s`

A reader takes over when the lock falls free. The writer alone begins a folder anew; readers see that by the
number of the file, and open the new one.

Threads: the tier's writer, but for `database`, `rows`, `writes`, `reads_only`, `found_wrong`, `used` and
`trouble`: any.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from cachemgr.contract import BlockHash
from cachemgr.tiers.lmdb_tier.counts import LmdbCounts
from cachemgr.tiers.lmdb_tier.database import FIRST_MAP_NBYTES, Database
from cachemgr.tiers.lmdb_tier.errors import LmdbTrouble, MustReopen, StoreBroken
from cachemgr.tiers.lmdb_tier.folder import TierFolder
from cachemgr.tiers.lmdb_tier.record import MOST_STAMP, PAGE_NBYTES
from cachemgr.tiers.lmdb_tier.rows import LEAST_ROWS, Rows
from cachemgr.tiers.lmdb_tier.settings import LmdbTierSettings

log = logging.getLogger(__name__)

_OTHER_FILES_NBYTES = 64 << 10
"""LMDB's table of readers, and the files of locks."""
_CHECK_READERS_S = 60.0
_SAY_AGAIN_S = 600.0
"""The same trouble, if it comes and goes, is said no more often."""
_NOTED_CALLS = 4096
"""Calls whose blocks count as used that may wait; older ones are forgotten."""


class LmdbShelf:
    """`look` again and again; `close` once."""

    def __init__(
        self,
        settings: LmdbTierSettings,
        counts: LmdbCounts,
        *,
        clock: Callable[[], float],
        folder: TierFolder | None = None,
    ) -> None:
        self.database: Database | None = None
        self.rows = Rows(LEAST_ROWS)
        """Empty while this process is not the writer."""
        self.stamp = 0
        """The last one given."""
        self.map_nbytes = 0
        self.used_nbytes = 0
        """Of the file, by blocks and the tree over them."""
        self.bound = (settings.max_bytes - _OTHER_FILES_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
        """Of the file of blocks."""
        self._settings = settings
        self._counts = counts
        self._clock = clock
        self._folder = folder or TierFolder(Path(settings.path))
        self._wrong: deque[tuple[BlockHash, int]] = deque(maxlen=_NOTED_CALLS)
        self._used: deque[Sequence[BlockHash]] = deque(maxlen=_NOTED_CALLS)
        self._writer = False
        """How the database is open."""
        self._reported: tuple[LmdbTrouble, Database] | None = None
        self._open_at = 0.0
        self._write_at = 0.0
        self._check_at = 0.0
        self._said = False
        self._said_text = ""
        self._say_again_at = 0.0

    @property
    def writes(self) -> bool:
        """True while this process keeps what is offered."""
        return self.database is not None and self._writer

    @property
    def reads_only(self) -> bool:
        """True while it is open, and another process keeps what it is offered, or nobody."""
        return self.database is not None and not self._writer

    @property
    def may_write(self) -> bool:
        """True if a transaction may be tried now."""
        return self.writes and self._clock() >= self._write_at

    def found_wrong(self, key: BlockHash, stamp: int) -> None:
        """A block failed its check: the writer removes it, unless it was replaced since."""
        self._wrong.append((key, stamp))

    def used(self, keys: Sequence[BlockHash]) -> None:
        """Blocks of a chain, from its front, were used."""
        self._used.append(keys)

    def trouble(self, error: LmdbTrouble, database: Database) -> None:
        """`database` could not be read: it is opened anew."""
        self._reported = (error, database)

    # The writer's thread.

    def look(self) -> None:
        """Open, take over, open anew: whatever is due."""
        try:
            self._take_report()
            if self.database is None:
                if self._clock() >= self._open_at:
                    self._open()
            elif not self._writer and (self._folder.take() or self._replaced()):
                self._shut()
                self._open()
            if self.database is not None and self._clock() >= self._check_at:
                self._check_at = self._clock() + _CHECK_READERS_S
                self._counts.dead_readers += self.database.drop_dead_readers()
        except LmdbTrouble as error:
            self._failed(error)

    def use_noted(self) -> None:
        """Tell the policy what was used."""
        while self._used:
            self.rows.use(self._used.popleft())

    def take_wrong(self) -> list[tuple[BlockHash, int]]:
        """What was found wrong."""
        return [self._wrong.popleft() for _ in range(len(self._wrong))]

    def write_failed(self, error: LmdbTrouble) -> None:
        """A transaction came to nothing: the disk is left alone for a while; reading goes on."""
        self._say(error)
        self._write_at = self._clock() + self._settings.retry_s
        if isinstance(error, MustReopen | StoreBroken) and self.database is not None:
            self._reported = (error, self.database)

    def write_succeeded(self) -> None:
        """A transaction was committed."""
        if self._said:
            self._said = False
            log.info("lmdb: %s works again", self._folder.path)

    def gauges(self) -> dict[str, float]:
        """What there is now. Any thread."""
        return {
            "entries": float(len(self.rows)),
            "bytes": float(self.used_nbytes if self._writer else 0),
            "map_bytes": float(self.map_nbytes),
            "writer": float(self.writes),
        }

    def close(self) -> None:
        """What is committed is on disk, the files are closed, another process may write."""
        wrote = self.writes
        try:
            self._shut()
            if wrote:
                self._folder.mark_synced()
        except LmdbTrouble as error:
            self._say(error)
        if self.database is None:  # else a read is stuck in its files: they stay ours until we are gone
            self._folder.release()

    def _take_report(self) -> None:
        report, self._reported = self._reported, None
        if report is not None and report[1] is self.database:
            error, _ = report
            self._shut()
            if isinstance(error, StoreBroken) and self._folder.writes:
                self._begin_anew(str(error))
            raise error

    def _failed(self, error: LmdbTrouble) -> None:
        self._say(error)
        self._open_at = self._clock() + self._settings.retry_s

    def _say(self, error: LmdbTrouble) -> None:
        self._counts.disk_errors += 1
        now, text = self._clock(), str(error)
        if not self._said and (text != self._said_text or now >= self._say_again_at):
            self._said, self._said_text, self._say_again_at = True, text, now + _SAY_AGAIN_S
            path, retry_s = self._folder.path, self._settings.retry_s
            log.warning("lmdb: %s is in trouble (%s): tried again every %g s", path, error, retry_s)

    def _open(self) -> None:
        writer = self._folder.take()
        if writer:
            self._prepare()
        elif not self._folder.data_nbytes():
            self._open_at = self._clock() + self._settings.batch_s  # the writer has not made it yet
            return
        elif not self._folder.whole():
            raise LmdbTrouble("not known to be whole since the machine was started")
        try:
            self._open_whole(writer)
        except StoreBroken as error:
            if not writer:
                raise
            self._begin_anew(str(error))
            self._open_whole(writer)
        if writer:
            log.info(
                "lmdb: %s is written by this process: %d blocks found", self._folder.path, len(self.rows)
            )
        self.write_succeeded()

    def _open_whole(self, writer: bool) -> None:
        """Opened, and who writes knows what is there; or closed."""
        self._open_database(writer)
        if writer:
            try:
                self._load()
            except BaseException:
                self._shut()
                raise

    def _prepare(self) -> None:
        self._folder.finish_beginning_anew()
        if not self._folder.whole():
            self._begin_anew("not known to be whole since the machine was started")
        if self._folder.data_nbytes() > self.bound:
            self._begin_anew(f"larger than max_bytes = {self._settings.max_bytes}")
        if self._settings.sync == "lazy":
            self._folder.mark_unsynced()

    def _open_database(self, writer: bool) -> None:
        folder, synced = self._folder, self._settings.sync == "batch"
        with folder.opening():
            nbytes = min(self.bound, max(FIRST_MAP_NBYTES, folder.data_nbytes())) if writer else self.bound
            database = Database(
                folder.blocks, map_nbytes=nbytes, writer=writer, locked=not folder.frozen, synced=synced
            )
        if writer and synced:
            database.sync()
            folder.mark_synced()
        self.map_nbytes = database.map_nbytes
        self.database = database
        self._writer = writer

    def _load(self) -> None:
        """Names and headers only. Until it is done, this process knows of nothing here."""
        assert self.database is not None
        with self.database.snapshot() as snapshot:
            keys, records = snapshot.records()
            self.used_nbytes = snapshot.used_nbytes()
        self.rows, self.stamp = Rows.found(keys, records, bound=self.bound)
        if self.stamp >= MOST_STAMP:
            raise StoreBroken("a record has a stamp that no writer gives")

    def _shut(self) -> None:
        """Close the files; all that was committed is on disk. LmdbTrouble, and they stay open, else."""
        database = self.database
        if database is not None:
            if self._writer and self._settings.sync == "lazy":
                database.sync()
            database.close()
            self.database = None
            self._writer = False
            self.rows = Rows(LEAST_ROWS)

    def _begin_anew(self, why: str) -> None:
        log.warning("lmdb: %s is begun anew: %s", self._folder.path, why)
        self._folder.begin_anew()
        self._counts.begun_anew += 1
        if self._settings.sync == "lazy":
            self._folder.mark_unsynced()

    def _replaced(self) -> bool:
        return self.database is not None and self._folder.data_inode() != self.database.inode
