"""What bringing blocks from a tier takes, learned from what it took lately.

    known │ ask_s │ get │ first_s │ block_s │ block_s │ …

Each of the three is the median of recent samples, so that one odd sample moves nothing. It begins with a
guess that is better than any tier: so every tier is tried, and takes more than one bad sample to be judged.

A fetch that was cut is a sample, too: it would have taken longer. Who is judged too slow is asked no more,
and nothing would ever show that he is quick by now: what is expected of a tier draws near to the first guess
again with time. Both are to be had: what was `measured`, and what is `expected` by now.

Threads: the IO loop.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

HALF_LIFE_S = 2.0
"""In so much time, half of what a tier was slower than the first guess is forgiven."""

_KEPT = 9
_GUESSES = 2
"""So many samples must be as bad before a tier is."""

_LONGER = 2.0
"""What was cut would have taken so many times what it had taken by then. At least."""

_ASK_S = 2e-4
_FIRST_S = 3e-4
_BYTES_PER_S = 4e9
_SIZES = 64
"""Pairs of a tier and a payload size that are remembered; a node has two or three."""


class FadingMedian:
    """A number of seconds as it was measured lately, and as it may be by now. `clock`: monotonic seconds."""

    __slots__ = ("_clock", "_guess", "_noted_at", "_samples", "measured")

    def __init__(self, guess: float, *, clock: Callable[[], float]) -> None:
        self._guess = guess
        self._clock = clock
        self._samples = deque([guess] * _GUESSES, maxlen=_KEPT)
        self._noted_at = clock()
        self.measured = guess
        """The median of recent samples."""

    @property
    def expected(self) -> float:
        """`measured`, as far as it is not forgotten."""
        beyond = self.measured - self._guess
        if beyond <= 0:
            return self.measured
        age_s = max(0.0, self._clock() - self._noted_at)
        return self._guess + beyond * math.exp2(-age_s / HALF_LIFE_S)

    def note(self, seconds: float) -> None:
        """It took so long."""
        self._samples.append(max(0.0, seconds))
        self._noted_at = self._clock()
        self.measured = median(self._samples)

    def note_longer(self, seconds: float) -> None:
        """It had not happened after so long: which confirms nothing that is half forgotten."""
        self.note(max(self.expected, _LONGER * seconds))


@dataclass(frozen=True, slots=True)
class Price:
    """What a tier's blocks cost, in seconds: to ask it, to begin, and each block."""

    ask_s: float
    begin_s: float
    block_s: float

    def fetch_s(self, blocks: int) -> float:
        """Of so many blocks, once it is known that the tier has them."""
        return self.begin_s + blocks * self.block_s if blocks else 0.0


class FetchCost:
    """Of one tier, for blocks of one size."""

    __slots__ = ("_ask", "_block", "_first")

    def __init__(self, payload_nbytes: int, *, clock: Callable[[], float]) -> None:
        block_s = payload_nbytes / _BYTES_PER_S
        self._ask = FadingMedian(_ASK_S, clock=clock)
        self._first = FadingMedian(_FIRST_S + block_s, clock=clock)
        self._block = FadingMedian(block_s, clock=clock)

    @property
    def measured(self) -> Price:
        """As it was lately."""
        return _price(self._ask.measured, self._first.measured, self._block.measured)

    @property
    def expected(self) -> Price:
        """As it may be by now."""
        return _price(self._ask.expected, self._first.expected, self._block.expected)

    def answered(self, seconds: float) -> None:
        """The tier said what it has."""
        self._ask.note(seconds)

    def fetched(self, blocks: int, *, first_s: float, last_s: float) -> None:
        """So many came; the first and the last so many seconds after they were asked for."""
        if blocks:
            self._first.note(first_s)
        if blocks > 1:
            self._block.note((last_s - first_s) / (blocks - 1))

    def fetched_all(self, blocks: int, *, seconds: float) -> None:
        """So many came, nobody saw when; it took so long."""
        if blocks:
            self._block.note(seconds / blocks)

    def silent(self, seconds: float) -> None:
        """Nothing came in this time: not an answer, or not the first block. Any block is as slow, then."""
        for estimate in (self._ask, self._first, self._block):
            estimate.note_longer(seconds)

    def slow(self, seconds: float, *, blocks: int) -> None:
        """After the first block, so many were still not all here after this time."""
        self._block.note_longer(seconds / max(1, blocks))


def _price(ask_s: float, first_s: float, block_s: float) -> Price:
    return Price(ask_s, max(0.0, first_s - block_s), block_s)


class FetchCosts:
    """By tier and size."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._costs: OrderedDict[tuple[str, int], FetchCost] = OrderedDict()

    def of(self, tier: str, payload_nbytes: int) -> FetchCost:
        """What is known of it; what is asked for least recently is forgotten first."""
        key = tier, payload_nbytes
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = FetchCost(payload_nbytes, clock=self._clock)
            if len(self._costs) > _SIZES:
                self._costs.popitem(last=False)
        self._costs.move_to_end(key)
        return cost

    def forget(self, tier: str) -> None:
        """It is another one than it was: it begins with the first guess."""
        for key in [key for key in self._costs if key[0] == tier]:
            del self._costs[key]
