"""One Redis server: a few connections, given out one exchange at a time, and a breaker that hears of each.

Requests go only while the breaker is closed; once it is open, `look` sees whether the server is back, so that
no request has to. A request that had too little time to say anything about the server is counted, and the
breaker does not hear of it.

Invariant: a connection is kept for the next exchange only if the last one on it ended as it should.
Threads: the IO loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from cachemgr.breaker import Breaker
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client import Kind, RedisLine, RedisTrouble, SmallAnswers
from cachemgr.redis_client.line import Answers, Buffer
from cachemgr.tiers.redis_tier.counts import RedisCounts

_FAIR_S = 0.05
"""A server that was silent for less than this is not to blame."""
_ALMOST = 0.9
"""Of `call_s`: a deadline is counted from a little earlier."""

READER_PARDONS = frozenset({Kind.ELSEWHERE, Kind.FULL})
"""Refusals that say nothing about the next request."""
WRITER_PARDONS = READER_PARDONS | {Kind.FORBIDDEN, Kind.REFUSED, Kind.READ_ONLY}
"""Refusals of a write that say nothing about reading."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Manners:
    """How every server is treated."""

    call_s: float
    breaker_s: float
    connections: int
    ttl_ms: int
    probe: bytes
    """A key to ask for when looking whether it answers."""


class Server:
    """`address`, asked with `manners`. `worry()`: it is worth a look. `lost()`: a connection broke."""

    def __init__(
        self,
        address: RedisAddress,
        manners: Manners,
        *,
        counts: RedisCounts,
        clock: Clock,
        worry: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self.address = address
        self._manners = manners
        self._counts = counts
        self._clock = clock
        self._worry = worry
        self._lost = lost
        self._breaker = Breaker(f"Redis at {address}", open_s=manners.breaker_s, clock=clock)
        self._room = asyncio.Semaphore(manners.connections)
        self._idle: list[RedisLine] = []
        self._lines: set[RedisLine] = set()
        self._heard_at = -inf
        self._closed = False

    @property
    def usable(self) -> bool:
        """True while requests may go."""
        return self._breaker.closed and not self._closed

    async def ask(
        self,
        commands: Sequence[Sequence[bytes | int]],
        *,
        deadline: float = inf,
        pardons: Set[Kind] = READER_PARDONS,
    ) -> list[Any]:
        """Answers to small commands, by `deadline` and within `call_s`; RedisTrouble if there are none."""
        answers = SmallAnswers(commands)
        limit = min(deadline, self._now() + self._manners.call_s)
        await self.exchange(answers, deadline=limit, pardons=pardons)
        return answers.values

    async def exchange(
        self,
        answers: Answers,
        *,
        deadline: float,
        data: Iterable[Buffer] = (),
        pardons: Set[Kind] = READER_PARDONS,
    ) -> None:
        """One exchange, each answer within `call_s`; RedisTrouble at once while it is not usable.

        The breaker opens for refusals, but for those that are pardoned.
        """
        if not self.usable:
            self._counts.not_asked += 1
            text = "is not asked for now"
            raise RedisTrouble(f"Redis at {self.address} {text}", kind=Kind.ABSENT, reason=text)
        await self._exchange(answers, deadline=deadline, data=data, pardons=pardons)

    async def look(self) -> None:
        """See whether it answers, if it is time to, and permits what reading needs.

        While it does not, and the breaker is still closed, it is asked again: no request should have to.
        """
        while self._worth_a_look() and self._breaker.admit():
            key, ttl_ms = self._manners.probe, self._manners.ttl_ms
            answers = SmallAnswers([(b"EXISTS", key), (b"GETEX", key, b"PX", ttl_ms)])
            with suppress(RedisTrouble):  # counted, and the breaker heard of it
                await self._exchange(answers, deadline=self._now() + self._manners.call_s)
            if answers.complete or self._closed:
                return

    async def close(self) -> None:
        """Drop all connections, whatever is under way on them. Idempotent."""
        self._closed = True
        for line in (*self._lines, *self._idle):
            line.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop lets go of the sockets in its next turn

    def _worth_a_look(self) -> bool:
        if self._breaker.closed:
            return self._clock() - self._heard_at >= self._manners.breaker_s
        return self._breaker.due

    async def _exchange(
        self,
        answers: Answers,
        *,
        deadline: float,
        data: Iterable[Buffer] = (),
        pardons: Set[Kind] = READER_PARDONS,
    ) -> None:
        await self._wait_for_room(deadline)
        began, line = self._now(), None
        try:
            line = await self._line(deadline)
            await line.ask(answers, deadline=deadline, quiet_s=self._manners.call_s, data=data)
        except RedisTrouble as trouble:
            self._failed(trouble, began=began, line=line)
            raise
        finally:
            self._room.release()
            if line is not None:
                self._lines.discard(line)
                self._keep(line)
        self._heard_at = self._clock()
        refusal = next((one for one in answers.refusals if one.kind not in pardons), None)
        if refusal is None:
            self._breaker.answered()
            return
        self._tell(refusal, at_once=True)
        for kept in self._idle:  # the server's name may stand for another one by now
            kept.close()

    async def _line(self, deadline: float) -> RedisLine:
        """A connection to use alone; made within `call_s` if none is free."""
        while self._idle:
            line = self._idle.pop()
            if line.usable:
                break
            self._lost()
        else:
            limit = max(0.001, min(self._manners.call_s, deadline - self._now()))
            line = await RedisLine.open(self.address, timeout_s=round(limit, 3))
        self._lines.add(line)
        return line

    def _keep(self, line: RedisLine) -> None:
        if line.usable and not self._closed:
            self._idle.append(line)
        else:
            line.close()

    async def _wait_for_room(self, deadline: float) -> None:
        """RedisTrouble if all connections are in use until `deadline`: nothing that the server could help."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._room.acquire()
        except TimeoutError:
            self._counts.timeouts += 1
            reason = "has no connection free in time"
            raise RedisTrouble(f"Redis at {self.address} {reason}", kind=Kind.SILENT, reason=reason) from None

    def _failed(self, trouble: RedisTrouble, *, began: float, line: RedisLine | None) -> None:
        if trouble.kind is not Kind.SILENT:
            if line is not None:
                self._lost()
            self._tell(trouble, at_once=line is None)  # nobody lets us in
            return
        self._counts.timeouts += 1
        now = self._now()
        silent_s = now - (began if line is None else line.heard_at)
        unanswered_s = now - (began if line is None else line.answered_at)
        if silent_s >= _FAIR_S or unanswered_s >= _ALMOST * self._manners.call_s:
            self._tell(trouble, at_once=False)
        elif line is None or line.heard_at == line.asked_at:
            self._heard_at = -inf  # it had little time, and said nothing
            self._worry()

    def _tell(self, trouble: RedisTrouble, *, at_once: bool) -> None:
        if self._closed:
            return
        self._counts.troubles += 1
        opened = self._breaker.opened
        self._breaker.trouble(trouble.reason, refused=at_once)
        self._counts.breaker_opened += self._breaker.opened - opened

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
