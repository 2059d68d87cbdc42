"""How long a prompt takes to compute, measured while the engine serves: what a fetch must not exceed.

The estimate is the median seconds per token of recent prefills: a step that was held up, or the first one
after a pause, does not move it.

Threads: owned by the step loop.
"""

from collections import deque
from statistics import median

FIRST_GUESS_TOKENS_PER_S = 500.0
"""Before anything was measured: a slow engine, so that the first fetch is not given up too soon."""

_KEPT = 33
_FEWEST_TOKENS = 16


class PrefillCost:
    """Seconds per token of one engine."""

    def __init__(self) -> None:
        self._seconds_per_token: deque[float] = deque(maxlen=_KEPT)
        self._median = 1 / FIRST_GUESS_TOKENS_PER_S

    def observe(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took `seconds`; short ones say little about long ones and are left out."""
        if tokens >= _FEWEST_TOKENS:
            self._seconds_per_token.append(seconds / tokens)
            self._median = median(self._seconds_per_token)

    def seconds(self, tokens: int) -> float:
        """What computing `tokens` is expected to take."""
        return tokens * self._median
