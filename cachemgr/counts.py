"""What the cache counts: monotonic totals, exported by name for the metrics page."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counts:
    """Totals since the cache was opened. Each has one writer: the step loop or the lock's holder."""

    acquires: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    foreign_hit_blocks: int = 0
    """Of `hit_blocks`: in the arena of another process."""
    restored_blocks: int = 0
    restore_seconds: float = 0.0
    committed_blocks: int = 0
    aborted_blocks: int = 0
    evicted_blocks: int = 0
    expired_blocks: int = 0
    corrupt_blocks: int = 0
    unreadable_blocks: int = 0
    stale_blocks: int = 0
    """Another process reused the slot, or let go of the arena, before we read it."""
    reattached_blocks: int = 0
    lost_arenas: int = 0
    """Deleted or cut, while we used them, by something that is no cache."""
    full_refusals: int = 0
    declined_blocks: int = 0
    """Not kept: worth less than what would have gone for them."""
    quota_evictions: int = 0
    """Of `evicted_blocks`: went because their namespace was at its quota."""
    share_evictions: int = 0
    """Of `evicted_blocks`: went for another namespace, whose share was less used."""
    received_blocks: int = 0
    """Published here, made elsewhere."""
    dropped_blocks: int = 0
    """They belong to other nodes now."""
    fetches: int = 0
    """Leases that had to wait for blocks from elsewhere."""
    fetched_blocks: int = 0
    """What those leases grew by."""
    fetch_seconds: float = 0.0
    fetch_timeouts: int = 0
    """Fetches that were not done at their deadline."""

    def totals(self) -> dict[str, float]:
        """Every total as `cache_<what>_total`."""
        return {f"cache_{name}_total": float(value) for name, value in asdict(self).items()}
