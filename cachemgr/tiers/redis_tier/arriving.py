"""Values of a run on their way into reserved slots: each judged by its header, checked while it is hot.

    "$<length>" → 128 bytes of header → HostStore.check → reserve → payload into the slot, the tag over each
    quarter MiB → publish or abort → the next one is asked for

What comes between payloads lies in a few KiB of our own; a payload goes from the socket into its slot.

Invariants
- A value is published only under the address that was asked for, and after its tag passed.
- The run ends at the first block that is not there or not whole; what was asked for beyond it is read to its
  end and forgotten, so that the connection stays good.
Threads: the IO loop.
"""

from collections.abc import Callable, Sequence

from cachemgr.host_contract import HostStore, IncomingShard
from cachemgr.redis_client import RedisLine, RedisTrouble
from cachemgr.redis_client.line import PIECE_NBYTES, NotRedis, refusal_said
from cachemgr.shard import HEADER_NBYTES, BlockAddress, ShardCheck, Verdict
from cachemgr.tiers.redis_tier.counts import RedisCounts

_HEAD_NBYTES = 4096
_LONGEST_LINE = 1024
_MOST_EXTRA = 64 << 20
"""A value that is longer than what was asked for by more than this ends the connection instead."""

_FORGOTTEN = memoryview(bytearray(PIECE_NBYTES))
"""Where bytes go that nobody wants. Never read."""


class _Value:
    """The payload of one block, for which a slot is reserved."""

    __slots__ = ("_check", "_header", "_payload", "_received", "_slot", "_store", "_tagged")

    def __init__(self, store: HostStore, slot: IncomingShard, header: bytes, check: ShardCheck) -> None:
        self._store = store
        self._slot = slot
        self._header = header
        self._check = check
        self._payload = slot.payload
        self._received = self._tagged = 0

    @property
    def missing(self) -> int:
        return self._payload.nbytes - self._received

    def room(self) -> memoryview:
        start = self._received
        return self._payload[start : min(self._tagged + PIECE_NBYTES, self._payload.nbytes)]

    def advance(self, count: int) -> None:
        self._received = received = self._received + count
        if received - self._tagged >= PIECE_NBYTES or not self.missing:
            self._check.update(self._payload[self._tagged : received])
            self._tagged = received

    def finish(self) -> bool:
        """Publish it if its tag passes."""
        if not self._check.passed():
            self._store.abort(self._slot)
            return False
        self._store.publish(self._slot, self._header)
        return True

    def drop(self) -> None:
        self._store.abort(self._slot)


class ArrivingRun:
    """The answers to `requests` for `blocks`, at most `window` of them asked for ahead."""

    def __init__(
        self,
        store: HostStore,
        blocks: Sequence[BlockAddress],
        requests: Sequence[bytes],
        *,
        window: int,
        arrived: Callable[[int], None],
        counts: RedisCounts,
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._requests = requests
        self._window = window
        self._arrived = arrived
        self._counts = counts
        self._head = memoryview(bytearray(_HEAD_NBYTES))
        self._filled = 0
        self._skip = 0
        self._asked = self._answered = 0
        self._value: _Value | None = None
        self.ended = False
        """The run goes no further: a block was not there, or not whole."""
        self.wrong: list[BlockAddress] = []
        """To be removed there."""
        self.absent: list[BlockAddress] = []
        """Not there."""
        self.refusals: list[RedisTrouble] = []

    @property
    def complete(self) -> bool:
        """See Answers."""
        rest = self._value is not None or self._skip or self._filled
        return not rest and self._answered == self._asked and (self.ended or self._asked == len(self._blocks))

    def begin(self, line: RedisLine) -> None:
        """See Answers."""
        self._line = line
        self._ask(self._window)

    def room(self) -> memoryview:
        """See Answers."""
        if self._value is not None:
            return self._value.room()
        if self._skip > _HEAD_NBYTES:
            return _FORGOTTEN[: self._skip]
        return self._head[self._filled :]

    def advance(self, count: int) -> None:
        """See Answers."""
        if self._value is not None:
            self._value.advance(count)
            if not self._value.missing:
                self._finish()
        elif self._skip > _HEAD_NBYTES:
            self._skip -= count
        else:
            self._filled += count
            self._parse()

    def drop(self) -> None:
        """Nobody wants the rest: give a reserved slot back. Idempotent."""
        self.ended = True
        value, self._value = self._value, None
        if value is not None:
            self._skip = value.missing + 2
            self._answered += 1
            value.drop()

    def _ask(self, count: int) -> None:
        last = min(self._asked + count, len(self._requests))
        if last > self._asked and not self.ended:
            self._line.send(b"".join(self._requests[self._asked : last]))
            self._asked = last

    def _parse(self) -> None:
        """Take what lies in `_head`, as far as it goes."""
        start = 0
        while self._value is None:
            skipped = min(self._skip, self._filled - start)
            self._skip -= skipped
            start += skipped
            used = 0 if self._skip else self._take(start)
            if not used:
                break
            start += used
        rest = bytes(self._head[start : self._filled])
        self._head[: len(rest)] = rest
        self._filled = len(rest)

    def _take(self, start: int) -> int:
        """Bytes used of the answer that begins at `start`; 0 if more must come first."""
        head = bytes(self._head[start : min(self._filled, start + _LONGEST_LINE)])
        line, found, _ = head.partition(b"\r\n")
        if not found:
            if len(head) == _LONGEST_LINE:
                raise NotRedis("a line without an end")
            return 0
        if self._answered == self._asked:
            raise NotRedis("more answers than questions")
        if line[:1] == b"-":
            self.refusals.append(refusal_said(line[1:].decode("utf-8", "replace"), self._line))
            self._end()
        elif line == b"$-1":
            self._counts.missing_blocks += not self.ended
            self.absent.append(self._blocks[self._answered])
            self._end()
        elif line[:1] == b"$" and line[1:].isdigit():
            return self._take_value(start, len(line) + 2, int(line[1:]))
        else:
            raise NotRedis("no value")
        return len(line) + 2

    def _take_value(self, start: int, used: int, nbytes: int) -> int:
        expected = HEADER_NBYTES + self._store.payload_nbytes
        if nbytes > expected + _MOST_EXTRA:
            raise NotRedis(f"a value of {nbytes} bytes, where {expected} were asked for")
        if self.ended or nbytes != expected:
            if not self.ended:
                self._corrupt()
            self._skip = nbytes + 2
            self._answer()
            return used
        begins = start + used
        if self._filled - begins < HEADER_NBYTES:
            return 0
        header = bytes(self._head[begins : begins + HEADER_NBYTES])
        used += HEADER_NBYTES
        self._value = self._reserved(header)
        if self._value is None:
            self._skip = self._store.payload_nbytes + 2
            self._answer()
            return used
        begins += HEADER_NBYTES
        room = self._value.room()
        count = min(self._filled - begins, room.nbytes)
        room[:count] = self._head[begins : begins + count]
        self._value.advance(count)
        if not self._value.missing:
            self._finish()
        return used + count

    def _reserved(self, header: bytes) -> _Value | None:
        block = self._blocks[self._answered]
        check = self._store.check(header, block)
        if isinstance(check, Verdict):
            if check is Verdict.CORRUPT:
                self._corrupt()
            else:
                self._counts.unreadable_blocks += 1
                self._end_run()
            return None
        slot = self._store.reserve(block)
        if slot is None:
            self._counts.not_kept_blocks += 1
            return None
        return _Value(self._store, slot, header, check)

    def _finish(self) -> None:
        value, self._value = self._value, None
        assert value is not None
        nbytes = self._store.payload_nbytes
        if value.finish():
            self._counts.get_blocks += 1
            self._counts.got_bytes += nbytes
            self._arrived(nbytes)
        else:
            self._corrupt()
        self._skip = 2
        self._answer()

    def _corrupt(self) -> None:
        self._counts.corrupt_blocks += 1
        self.wrong.append(self._blocks[self._answered])
        self._end_run()

    def _end(self) -> None:
        self._end_run()
        self._answer()

    def _end_run(self) -> None:
        self.ended = True

    def _answer(self) -> None:
        self._answered += 1
        self._line.progress()
        self._ask(1)
