"""What became of fetches, by tier.

Threads: the IO loop.
"""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class FetchCounts:
    """Totals of one tier."""

    asks: int = 0
    """How often it was asked what it has."""
    fetches: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    joined_blocks: int = 0
    """Were on their way for another request."""
    declined: int = 0
    """Not asked, or asked and not fetched from: computing is quicker."""
    trials: int = 0
    """Asked to see whether it is still slow."""
    cut: int = 0
    """Given up: it took too long for what it saved."""
    deadlines: int = 0
    """Given up: the request's time was over."""

    def landed(self, blocks: int, nbytes: int, seconds: float) -> None:
        """A fetch is over."""
        self.fetched_blocks += blocks
        self.fetched_bytes += nbytes
        self.fetch_seconds += seconds

    def totals(self) -> dict[str, float]:
        """Every total as `tier_<what>_total`."""
        return {f"tier_{name}_total": float(value) for name, value in asdict(self).items()}
