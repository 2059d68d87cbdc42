"""What every lower tier counts, under the same names: one total per thing that can become of a block.

What one of them counts beside that is in its own `counts`.
"""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class TierCounts:
    """Totals since the tier was opened."""

    known_calls: int = 0
    """Questions which blocks are there."""
    known_blocks: int = 0
    """Blocks that were said to be."""
    get_calls: int = 0
    get_blocks: int = 0
    """Brought, checked and published."""
    got_bytes: int = 0
    missing_blocks: int = 0
    """Asked for, and not there: each ends a `get`."""
    not_kept_blocks: int = 0
    """There, and here already or without room here."""
    corrupt_blocks: int = 0
    """There with other bytes than the block's."""
    removed_blocks: int = 0
    """Of those, removed there."""
    unreadable_blocks: int = 0
    """There under a version or a key id that this process does not know."""
    put_blocks: int = 0
    put_bytes: int = 0
    put_known: int = 0
    """Offered, and kept already: they count as used."""
    put_dropped: int = 0
    """Found the queue full or the tier in trouble, or waited when it closed."""
    put_gone: int = 0
    """No longer here when their turn came."""
    timeouts: int = 0
    """Calls that were given up at their deadline."""
    failed_calls: int = 0
    """Calls that ended in an exception: our own bug."""

    def totals(self) -> dict[str, float]:
        """Every total as `<what>_total`."""
        names = [field.name for field in fields(self) if not field.name.startswith("_")]
        return {f"{name}_total": float(getattr(self, name)) for name in names}
