"""What the tier in Redis counts beside what every tier does."""

from dataclasses import dataclass

from cachemgr.tiers.tier_counts import TierCounts


@dataclass(slots=True)
class RedisCounts(TierCounts):
    """Totals since the tier was opened."""

    put_refused: int = 0
    """The server would not take them: full, or not permitted."""
    troubles: int = 0
    """Exchanges that ended in any trouble, timeouts included."""
    not_asked: int = 0
    """Exchanges that a breaker saved us."""
    breaker_opened: int = 0
