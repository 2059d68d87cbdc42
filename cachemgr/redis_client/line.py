"""One connection to a Redis, whose answers go into memory that the caller names: one exchange at a time.

    ask ── writes the questions, in pieces, as fast as they are taken
        └─ Answers.room ── the bytes come there ── Answers.advance, until it says that all have come

Invariants
- A line on which anything is left unread, because of trouble, a deadline or a cancelled caller, is broken and
  closed: the next question on it could get the last one's answer.
- After `ask` nothing is read into or written from memory of the caller's.
Threads: that of the asyncio loop that uses it.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any, Protocol, Self

from cachemgr.errors import one_line
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client.redis_py import (
    BoundedReader,
    Login,
    ProtocolError,
    Reader,
    exceptions,
    packed,
    said,
)
from cachemgr.redis_client.trouble import Kind, RedisTrouble, trouble_of

Buffer = bytes | memoryview

PIECE_NBYTES = 256 << 10
"""Written at once: what the kernel does not take of a piece is copied by the transport."""

_WAITING_NBYTES = 64 << 10
"""Taken but not sent, before the next piece waits. Not 0: a transport inside TLS would never go on."""
_SCRATCH_NBYTES = 64 << 10


class NotRedis(ValueError):
    """What came is no answer to what was asked."""


class Answers(Protocol):
    """Takes the bytes of the answers to one exchange."""

    @property
    def complete(self) -> bool:
        """Every answer has come."""
        ...

    @property
    def refusals(self) -> Sequence[RedisTrouble]:
        """Those answers that were errors."""
        ...

    def begin(self, line: "RedisLine") -> None:
        """The line is ours: questions may be sent on it with `line.send`, also later from `advance`."""
        ...

    def room(self) -> memoryview:
        """Where to put the next bytes; never empty."""
        ...

    def advance(self, count: int) -> None:
        """So many bytes were put there. NotRedis if they are no answer."""
        ...


class SmallAnswers:
    """Answers to `commands` as values: bytes, int, list, None, or the RedisTrouble of a refusal."""

    def __init__(self, commands: Sequence[Sequence[str | bytes | int]] = (), *, others: int = 0) -> None:
        """`others`: how many more are asked by other means."""
        self.values: list[Any] = []
        self._commands = commands
        self._expected = len(commands) + others
        self._reader = BoundedReader(Reader(replyError=said, notEnoughData=NotRedis))
        self._scratch = bytearray(_SCRATCH_NBYTES)

    @property
    def complete(self) -> bool:
        """See Answers."""
        return len(self.values) == self._expected

    @property
    def refusals(self) -> Sequence[RedisTrouble]:
        """See Answers."""
        return [value for value in self.values if isinstance(value, RedisTrouble)]

    def begin(self, line: "RedisLine") -> None:
        """See Answers."""
        self._line = line
        if self._commands:
            line.send(b"".join(packed(command) for command in self._commands))

    def room(self) -> memoryview:
        """See Answers."""
        return memoryview(self._scratch)

    def advance(self, count: int) -> None:
        """See Answers."""
        try:
            self._reader.feed(bytes(self._scratch[:count]))
            while (value := self._reader.gets()) is not NotRedis:
                self.values.append(self._line.trouble(value) if isinstance(value, Exception) else value)
                self._line.progress()
        except ProtocolError as error:
            raise NotRedis(str(error)) from None
        if len(self.values) > self._expected or (self.complete and self._reader.has_data()):
            raise NotRedis("more answers than questions")


class RedisLine(asyncio.BufferedProtocol):
    """A logged-in connection; `open` makes one."""

    def __init__(self, address: RedisAddress, login: Login) -> None:
        self._address = address
        self._login = login
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answers: Answers | None = None
        self._ended: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._timeout: asyncio.Timeout | None = None
        self._ends_at = self._quiet_s = inf
        self._scratch = memoryview(bytearray(128))
        self.asked_at = self.heard_at = self.answered_at = self._loop.time()
        """When an exchange began last; when something, and a whole answer, came since (loop time)."""

    @classmethod
    async def open(cls, address: RedisAddress, *, timeout_s: float) -> Self:
        """Connect and log in within `timeout_s`, or RedisTrouble."""
        login = Login(address, timeout_s=timeout_s)
        line = cls(address, login)
        try:
            async with asyncio.timeout(timeout_s):
                line._transport = await login.connect(line)
        except (exceptions.RedisError, OSError) as error:
            login.close()
            raise trouble_of(error, address, waited_s=timeout_s) from None
        except BaseException:
            login.close()
            raise
        line._transport.set_write_buffer_limits(high=_WAITING_NBYTES)
        return line

    @property
    def usable(self) -> bool:
        """False once it was closed by either side."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(
        self, answers: Answers, *, deadline: float, quiet_s: float = inf, data: Iterable[Buffer] = ()
    ) -> None:
        """One exchange: `data` is sent, `answers` takes what comes.

        Ends by `deadline` (loop time), or `quiet_s` after the last `progress`; RedisTrouble then, and where
        the connection broke. `data` may lie in an arena: nothing of it is used when this returns or raises.
        """
        assert self._ended is None, "one exchange at a time"
        began = self.asked_at = self.heard_at = self.answered_at = self._loop.time()
        self._answers, self._ended = answers, self._loop.create_future()
        self._ends_at, self._quiet_s = deadline, quiet_s
        whole = False
        try:
            async with asyncio.timeout_at(min(deadline, began + quiet_s)) as self._timeout:
                if not self.usable:
                    raise ConnectionResetError("the connection was closed")
                answers.begin(self)
                await self._write(data)
                await self._ended
            whole = answers.complete
        except (NotRedis, OSError) as error:
            raise self.trouble(error, waited_s=round(self._loop.time() - began, 3)) from None
        finally:
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # read, also where a deadline was faster
            self._answers = self._ended = self._timeout = None
            if not whole:
                self.close()

    def send(self, data: bytes) -> None:
        """Send a few bytes more, during an exchange."""
        if self._transport is not None:
            self._transport.write(data)

    def progress(self) -> None:
        """An answer came: `quiet_s` begins anew."""
        self.answered_at = self._loop.time()
        timeout = self._timeout
        if timeout is not None and self._quiet_s < inf and not timeout.expired():
            timeout.reschedule(min(self._ends_at, self.answered_at + self._quiet_s))

    def trouble(self, error: Exception, *, waited_s: float = 0.0) -> RedisTrouble:
        """What an error on this line means."""
        if isinstance(error, NotRedis):
            reason = f"answers what is no Redis: {one_line(error)}"
            return RedisTrouble(f"Redis at {self._address} {reason}", kind=Kind.ABSENT, reason=reason)
        return trouble_of(error, self._address, waited_s=waited_s)

    def close(self) -> None:
        """Drop the connection. Idempotent."""
        self._transport = None
        self._login.close()
        self._fail(ConnectionResetError("the connection was closed"))

    # The transport's side.

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._scratch if self._answers is None else self._answers.room()

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        answers, ended = self._answers, self._ended
        if answers is None or ended is None or ended.done():
            # Nobody asked for this: it would be the next one's answer.
            self.close()
            return
        self.heard_at = self._loop.time()
        try:
            answers.advance(nbytes)
        except NotRedis as error:
            self._fail(error)
            return
        if answers.complete and not ended.done():
            ended.set_result(None)

    def eof_received(self) -> None:
        """The other side closed: so does the transport."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It broke, or was closed by either side."""
        self._transport = None
        self._login.close()
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the connection was closed"))

    def pause_writing(self) -> None:
        """The kernel takes no more for now."""
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """It does again."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    async def _write(self, data: Iterable[Buffer]) -> None:
        for piece in _pieces(data):
            if self._drained is not None:
                await asyncio.wait((self._drained, self._ended_now()), return_when=asyncio.FIRST_COMPLETED)
            if self._transport is None or self._ended_now().done():
                return  # it broke: `_ended` says so
            self._transport.write(piece)

    def _ended_now(self) -> asyncio.Future[None]:
        assert self._ended is not None
        return self._ended

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


def _pieces(data: Iterable[Buffer]) -> Iterator[Buffer]:
    for one in data:
        view = memoryview(one)
        for start in range(0, len(view), PIECE_NBYTES):
            yield view[start : start + PIECE_NBYTES]


def refusal_said(answer: str, line: RedisLine) -> RedisTrouble:
    """What an answer that is an error means, given without its leading `-`."""
    return line.trouble(said(answer))
