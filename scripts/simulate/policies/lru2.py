"""LRU-2: what was used for the second to last time longest ago goes first.

O'Neil, O'Neil, Weikum, "The LRU-K page replacement algorithm for database disk buffering", SIGMOD 1993.
Blocks that were used once only go before all others, the least recent first. The time of the last use is
kept for every block ever seen, so its history is unbounded; no correlated reference period.
"""

import heapq

_NEVER = -1
_Entry = tuple[int, int, int]
"""Second to last use, last use, block."""


class Lru2:
    """A heap by the second to last use; entries of blocks that were used since are passed over."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._clock = 0
        self._last: dict[int, int] = {}
        self._here: dict[int, _Entry] = {}
        self._heap: list[_Entry] = []

    def __contains__(self, block: int) -> bool:
        return block in self._here

    def touch(self, block: int) -> None:
        """See Policy."""
        if block not in self._here and len(self._here) >= self._capacity:
            self._evict()
        self._clock += 1
        entry = (self._last.get(block, _NEVER), self._clock, block)
        self._last[block] = self._clock
        self._here[block] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._here) + 1024:
            self._heap = list(self._here.values())
            heapq.heapify(self._heap)

    def _evict(self) -> None:
        while True:
            entry = heapq.heappop(self._heap)
            if self._here.get(entry[2]) is entry:
                del self._here[entry[2]]
                return
