"""Random numbers of the shapes that traffic has.

Only `Random.random` is used, the one method whose sequence Python promises to keep.
"""

import math
from bisect import bisect_right
from itertools import accumulate
from random import Random


class Draws:
    """One stream of numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def chance(self, probability: float) -> bool:
        """True that often."""
        return self._random() < probability

    def below(self, bound: int) -> int:
        """A whole number from 0 to `bound` − 1."""
        return int(self._random() * bound)

    def exponential(self, mean: float) -> float:
        """Time between events that know nothing of each other."""
        return -math.log(1.0 - self._random()) * mean

    def lognormal(self, median: float, spread: float) -> float:
        """Half below the median; `spread` is the deviation of the logarithm."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self._random()))
        return median * math.exp(spread * radius * math.cos(2.0 * math.pi * self._random()))

    def tokens(self, median: float, spread: float, *, most: int) -> int:
        """A length: lognormal, at least 1, at most `most`."""
        return max(1, min(most, round(self.lognormal(median, spread))))


class Zipf:
    """Ranks 0 … count − 1, the n-th with weight 1 / (n + 1) ** exponent."""

    def __init__(self, draws: Draws, count: int, *, exponent: float) -> None:
        self._draws = draws
        self._sums = list(accumulate((rank + 1) ** -exponent for rank in range(count)))

    def rank(self) -> int:
        """The next one."""
        place = self._draws.below(1 << 53) / (1 << 53) * self._sums[-1]
        return min(bisect_right(self._sums, place), len(self._sums) - 1)
