"""What the LMDB tier counts beside what every tier does."""

import threading
from dataclasses import dataclass, field

from cachemgr.tiers.tier_counts import TierCounts


@dataclass(slots=True)
class LmdbCounts(TierCounts):
    """Totals since this process began. A field that several threads write is raised by `add`."""

    put_declined: int = 0
    """Not worth what would have gone for them, says the policy."""
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
    _adding: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def add(self, **more: int) -> None:
        """Raise fields by so much. Any thread."""
        with self._adding:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)
