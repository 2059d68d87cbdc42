"""A block on its way into a reserved slot: judged by its header, received in place, checked while it is hot.

    header → HostStore.check → reserve → bytes into the slot, the tag over each quarter MiB → publish or abort

Invariants
- Nothing is reserved before the header was judged; nothing is published before the tag passed.
- The slot is given back exactly once, whatever happens: `finish` or `drop`.
- A block that cannot be kept is read to its end all the same, and forgotten: the frames behind it stay
  readable.
Threads: the IO thread.
"""

from enum import Enum

from cachemgr.host_contract import HostStore, IncomingShard
from cachemgr.shard import BlockAddress, ShardCheck, Verdict

PIECE_NBYTES = 256 << 10
"""Half of a small second-level cache: the tag reads what was just written."""

_FORGOTTEN = memoryview(bytearray(PIECE_NBYTES))
"""Where bytes go that nobody wants. Never read."""


class Outcome(Enum):
    """What became of a block."""

    PUBLISHED = "published"
    NOT_KEPT = "not kept"
    """Here already, no room, unreadable, or nobody wants it any more."""
    FOREIGN = "foreign"
    """Its header is not that of the block that was asked for."""
    CORRUPT = "corrupt"
    """Its tag is wrong."""


class IncomingBlock:
    """Takes the payload of one block."""

    __slots__ = (
        "_check", "_payload", "_received", "_slot", "_store", "_tagged", "header", "nbytes", "refusal",
    )  # fmt: skip

    def __init__(
        self, store: HostStore, address: BlockAddress, header: bytes, *, wanted: bool = True
    ) -> None:
        self._store = store
        self.header = header
        self.nbytes = store.payload_nbytes
        self.refusal = Outcome.NOT_KEPT
        """What it is if it is not published."""
        self._received = 0
        self._tagged = 0
        self._slot: IncomingShard | None = None
        self._check: ShardCheck | None = None
        judged = store.check(header, address)
        if isinstance(judged, ShardCheck):
            self._check = judged
            self._slot = store.reserve(address) if wanted else None
        elif judged is Verdict.CORRUPT:
            self.refusal = Outcome.FOREIGN
        self._payload = _FORGOTTEN if self._slot is None else self._slot.payload

    @property
    def kept(self) -> bool:
        """False if its bytes are forgotten as they come."""
        return self._slot is not None

    @property
    def missing(self) -> int:
        """Bytes that are still to come."""
        return self.nbytes - self._received

    def room(self, limit: int) -> memoryview:
        """Where to put the next bytes, at most `limit` of them; never empty unless all have come."""
        if self._slot is None:
            return _FORGOTTEN[: min(limit, self.missing)]
        start = self._received
        return self._payload[start : min(start + limit, self._tagged + PIECE_NBYTES, self.nbytes)]

    def advance(self, count: int) -> None:
        """So many bytes were put there."""
        self._received = received = self._received + count
        if self._slot is None:
            return
        if received - self._tagged >= PIECE_NBYTES or received == self.nbytes:
            assert self._check is not None
            self._check.update(self._payload[self._tagged : received])
            self._tagged = received

    def finish(self) -> Outcome:
        """All bytes have come: publish the block if its tag passes."""
        slot, self._slot = self._slot, None
        if slot is None:
            return self.refusal
        assert self._check is not None
        if not self._check.passed():
            self._store.abort(slot)
            return Outcome.CORRUPT
        self._store.publish(slot, self.header)
        return Outcome.PUBLISHED

    def drop(self) -> None:
        """Nobody wants it any more: give the slot back. What still comes is forgotten. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._payload = _FORGOTTEN
            self._store.abort(slot)
