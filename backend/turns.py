"""Whose turn it is: a queue per principal, and which of them gets the next lane and the next prefill.

Within a principal it is first come, first served. Between them lanes are given by start-time fair queueing
(Goyal, Vin, Cheng, "Start-time Fair Queueing", SIGCOMM 1996), each with the same weight: the principal that
has been served least goes first, and whoever had nothing to ask for saves up no claim meanwhile.

What a lane is worth is counted in tokens: those of the prompt that must be computed, and all that may be
sampled. What was not sampled is given back when the lane is. So nobody gains by asking for little and taking
much, as `max_tokens` binds, nor loses by stopping early, and what the cache has is free.

Invariants
- A sequence without a lane waits in one line, and `held` counts the lanes of a principal's sequences.
- A line is forgotten once its principal has nothing open and nothing left to pay off.

Threads: owned by the step loop.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify

from backend.sequence import Sequence


@dataclass(slots=True, eq=False)
class Line:
    """One principal: who waits, in order; how many lanes it holds; what it was given, in virtual tokens."""

    principal: str
    waiting: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    held: int = 0
    served: float = 0.0
    prefilled: int = 0
    """Number of the last part of a prefill it was given: the lowest is next."""


Turn = tuple[bool, float, int, Line]
"""Compared by what comes first: holds half of the lanes, was served, the ticket of its first."""


class Turns:
    """The lines of all principals."""

    def __init__(self, half: int) -> None:
        """`half` of the lanes, at least one."""
        self._half = half
        self._lines: dict[str, Line] = {}
        self._now = 0.0
        self._parts = 0
        self.waiting = 0
        """Sequences in all lines."""
        self.above: Line | None = None
        """Who holds more than half of the lanes: one at most."""

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, by principal."""
        return (seq for line in self._lines.values() for seq in line.waiting.values())

    @property
    def principals(self) -> int:
        """How many have somebody waiting."""
        return sum(1 for line in self._lines.values() if line.waiting)

    @property
    def lines(self) -> Collection[Line]:
        """All lines, those included where nobody waits."""
        return self._lines.values()

    def waiting_of(self, principal: str) -> int:
        """Sequences in the line of one."""
        line = self._lines.get(principal)
        return len(line.waiting) if line is not None else 0

    def append(self, seq: Sequence) -> None:
        """Let a newcomer wait behind the others of its principal."""
        line = self._lines.setdefault(seq.request.principal, Line(seq.request.principal))
        if not line.waiting:
            line.served = max(line.served, self._now)
        line.waiting[seq.ticket] = seq
        self.waiting += 1

    def put_back(self, seq: Sequence) -> None:
        """A sequence gives its lane back and waits in front of the others of its principal."""
        line = self._lines[seq.request.principal]
        line.waiting[seq.ticket] = seq
        line.waiting.move_to_end(seq.ticket, last=False)
        self.waiting += 1
        self.left(seq)

    def remove(self, seq: Sequence) -> None:
        """It waits no more."""
        line = self._lines[seq.request.principal]
        del line.waiting[seq.ticket]
        self.waiting -= 1
        self._tidy()

    def order(self) -> list[Turn]:
        """A heap of those with somebody waiting: first who holds fewer than half of the lanes."""
        heap = [self.key(line) for line in self._lines.values() if line.waiting]
        heapify(heap)
        return heap

    def key(self, line: Line) -> Turn:
        """Where a line stands in `order` now."""
        return line.held >= self._half, line.served, next(iter(line.waiting)), line

    def placed(self, seq: Sequence) -> None:
        """A sequence that waited got a lane, with what the cache had of it."""
        line = self._lines[seq.request.principal]
        self._now = max(self._now, min(other.served for other in self._lines.values() if other.waiting))
        line.served += seq.length - seq.written + seq.unsampled
        line.held += 1
        if line.held > self._half:
            self.above = line
        self.remove(seq)

    def left(self, seq: Sequence) -> None:
        """A sequence gave its lane back."""
        line = self._lines[seq.request.principal]
        line.held -= 1
        if line is self.above and line.held <= self._half:
            self.above = None
        line.served -= seq.unsampled
        self._tidy()

    def prefill_order(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """The oldest of each principal, then the second ones, …; who had the last part comes last."""
        ranks: dict[str, int] = {}
        keyed: list[tuple[int, int, Sequence]] = []
        for seq in seqs:
            principal = seq.request.principal
            rank = ranks[principal] = ranks.get(principal, -1) + 1
            keyed.append((rank, self._lines[principal].prefilled, seq))
        return [seq for *_, seq in sorted(keyed, key=lambda key: key[:2])]

    def prefilling(self, seq: Sequence) -> None:
        """A part of a prefill is given to a sequence."""
        self._parts += 1
        self._lines[seq.request.principal].prefilled = self._parts

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Prove the invariants above."""
        held: dict[str, int] = {}
        for seq in running:
            held[seq.request.principal] = held.get(seq.request.principal, 0) + 1
        lines = {name: line.held for name, line in self._lines.items() if line.held}
        assert lines == held, f"lanes are counted as {lines}, held {held}"
        above = [line for line in self._lines.values() if line.held > self._half]
        assert above == ([self.above] if self.above else []), "more than half is held by another"
        waiting = sum(len(line.waiting) for line in self._lines.values())
        assert self.waiting == waiting, f"{self.waiting} are said to wait, {waiting} do"
        for line in self._lines.values():
            assert line.held or line.waiting or line.served > self._now, "a line nobody needs"
            for ticket, seq in line.waiting.items():
                assert ticket == seq.ticket, "a ticket of another"
                assert seq.request.principal == line.principal, "in the line of another principal"

    def _tidy(self) -> None:
        idle = [line for line in self._lines.values() if not line.waiting and not line.held]
        if len(idle) == len(self._lines):
            self._lines.clear()
        for line in idle:
            if line.served <= self._now:
                self._lines.pop(line.principal, None)
