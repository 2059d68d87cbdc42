"""What the tier in Redis counts: one total per thing that can become of a question or of a block."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class RedisCounts:
    """Totals since the tier was opened."""

    known: int = 0
    """Questions which blocks are there."""
    known_blocks: int = 0
    """Blocks that were said to be."""
    gets: int = 0
    get_blocks: int = 0
    """Brought, checked and published."""
    got_bytes: int = 0
    missing_blocks: int = 0
    """Asked for and not there."""
    not_kept_blocks: int = 0
    """Came, and were here already or had no room."""
    corrupt_blocks: int = 0
    """Came with other bytes than the block's."""
    removed_blocks: int = 0
    """Of those, removed there."""
    unreadable_blocks: int = 0
    """Came under a version or a key id that this process does not know."""
    put_blocks: int = 0
    put_bytes: int = 0
    put_refreshed: int = 0
    """Offered, and there already: their time began anew."""
    put_dropped: int = 0
    """Found the queue full, or the server in trouble."""
    put_gone: int = 0
    """No longer here when their turn came."""
    put_refused: int = 0
    """The server would not take them: full, or not permitted."""
    timeouts: int = 0
    troubles: int = 0
    """Exchanges that ended in any trouble, timeouts included."""
    not_asked: int = 0
    """Exchanges that a breaker saved us."""
    breaker_opened: int = 0

    def totals(self) -> dict[str, float]:
        """Every total as `<what>_total`."""
        return {f"{name}_total": float(value) for name, value in asdict(self).items()}
