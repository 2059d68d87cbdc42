"""A token bucket: so much a second on average, one second's worth at once.

Source: the meter of J. Turner, "New directions in communications", IEEE Communications Magazine 24(10), 1986;
filled when it is looked at, as RFC 2697 describes, and allowed to run into debt, because nobody knows how
long an answer will be before it is there.
"""

import math
from dataclasses import dataclass
from typing import Final

_SLACK: Final = 1e-9
"""Who comes after the very time they were told finds enough, whatever floats make of it."""


@dataclass(slots=True)
class TokenBucket:
    """How much is left, since when. It starts full; without a rate it is never empty."""

    level: float = math.inf
    filled: float = 0.0

    def fill(self, rate: float | None, now: float) -> None:
        """Add what came in since the last time, at `rate` a second; None: there is no limit."""
        if rate is None:
            self.level = math.inf
        else:
            gained = max(0.0, now - self.filled) * rate
            self.level = min(_burst(rate), self.level + gained)
        self.filled = now

    def wait_s(self, amount: float, rate: float | None) -> float:
        """Seconds until there is `amount`; 0 if there is. Fill it first."""
        lacking = amount - self.level
        return 0.0 if rate is None or lacking <= _SLACK else lacking / rate

    def full(self, rate: float | None) -> bool:
        """Is it as if nothing had been taken? Fill it first."""
        return rate is None or self.wait_s(_burst(rate), rate) == 0

    def take(self, amount: float) -> None:
        """Take it out, into debt if it must be."""
        self.level -= amount


def _burst(rate: float) -> float:
    """What a full bucket holds: at least one, or nobody could ever come."""
    return max(1.0, rate)
