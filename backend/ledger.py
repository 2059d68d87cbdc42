"""What open releases count, as one set of numbers that no swap turns back.

Scheduler and cache of a release count from nought. The metrics page shows sums over the releases that are
open (two, while an old one finishes), and totals of those that were closed stay in them.

Threads: any.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable

from backend.metrics import Reading

Source = Callable[[], Iterable[Reading]]


class Ledger:
    """Sums by name and tier."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[object, Source]] = {}
        self._closed: dict[tuple[str, str], float] = {}

    def open(self, owner: object, source: Source) -> None:
        """Count what `source` tells of `owner` from now on; nothing new if it is counted already."""
        with self._lock:
            self._open.setdefault(id(owner), (owner, source))

    def close(self, owner: object) -> None:
        """Keep the totals of `owner`, forget its gauges and it."""
        with self._lock:
            _, source = self._open.pop(id(owner), (None, tuple))
            for reading in source():
                if reading.name.endswith("_total"):
                    key = reading.name, reading.tier
                    self._closed[key] = self._closed.get(key, 0.0) + reading.value

    def readings(self) -> list[Reading]:
        """Every number, once."""
        with self._lock:
            sums = defaultdict(float, self._closed)
            for _, source in self._open.values():
                for reading in source():
                    sums[reading.name, reading.tier] += reading.value
        return [Reading(name, value, tier) for (name, tier), value in sums.items()]
