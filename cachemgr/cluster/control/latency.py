"""How long a peer takes to answer, lately: an average that forgets.

A peer that was slow once is not asked again while others are quicker, so nothing would ever show that it is
quick by now: what is known of it halves every `HALF_LIFE_S` without news.

Threads: the IO thread.
"""

import math
from collections.abc import Callable

HALF_LIFE_S = 10.0
FLOOR_S = 1e-4
"""Of a peer nobody asked yet: somebody should."""

_WEIGHT = 0.2


class Latency:
    """`clock`: monotonic seconds."""

    __slots__ = ("_average_s", "_clock", "_noted_at")

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._average_s = FLOOR_S
        self._noted_at = clock()

    @property
    def seconds(self) -> float:
        """Expected of the next request."""
        age = self._clock() - self._noted_at
        return max(FLOOR_S, self._average_s * math.pow(0.5, age / HALF_LIFE_S))

    def note(self, seconds: float) -> None:
        """One request took this long, answered or not."""
        self._average_s = self.seconds + _WEIGHT * (seconds - self.seconds)
        self._noted_at = self._clock()
