"""What the LMDB tier counts."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class LmdbCounts:
    """Totals since this process began. Each field is written by one thread, or under the queue's lock."""

    known_calls: int = 0
    get_calls: int = 0
    get_blocks: int = 0
    got_bytes: int = 0
    missing_blocks: int = 0
    """Asked for, and not there: each ends a `get`."""
    corrupt_blocks: int = 0
    unreadable_blocks: int = 0
    timeouts: int = 0
    """Calls that were given up at their deadline."""
    failed_calls: int = 0
    """Calls that ended in an exception: our own bug."""
    put_blocks: int = 0
    put_bytes: int = 0
    put_known: int = 0
    """Offered and kept already: they count as used."""
    put_dropped: int = 0
    """Found the queue full, were in a batch that failed, or waited when it closed."""
    put_declined: int = 0
    """Not worth what would have gone for them, says the policy."""
    put_gone: int = 0
    """Left the host tier before their turn."""
    put_not_writer: int = 0
    """Offered while another process of this node, or nobody, writes this folder."""
    batches: int = 0
    evicted_blocks: int = 0
    map_full: int = 0
    """Transactions that found no room: the map was too small, or what was freed is not free for a reader."""
    map_growths: int = 0
    disk_errors: int = 0
    begun_anew: int = 0
    """The folder was emptied: broken, larger than its bound, or not known to be whole after a power cut."""
    dead_readers: int = 0
    """Places in LMDB's table of readers that killed processes had left."""

    def totals(self) -> dict[str, float]:
        """Every total as `<what>_total`."""
        return {f"{name}_total": float(value) for name, value in asdict(self).items()}
