"""S3-FIFO: a small queue that most blocks pass once, and a main queue for those that were used again.

Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023. The names of
blocks that just left the small queue are kept: one that comes back goes to the main queue at once.

Small queue 10 % of the capacity, as many names as the main queue has blocks, counters up to 3. A block goes
from the small queue to the main one if it was accessed more than once counting the access that brought it,
that is, if it was used at least once while it was there; the paper's listing, whose counter starts at 0, can
also be read as "at least twice", which on traces of prompts is a little worse in small caches and a little
better in large ones.
"""

from collections import OrderedDict

_SMALL_SHARE = 0.1
_MOST_USES = 3


class S3Fifo:
    """Three queues; blocks that are here with their counters."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_room = max(1, int(capacity * _SMALL_SHARE))
        self._main_room = capacity - self._small_room
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._small or block in self._main

    def touch(self, block: int) -> None:
        """See Policy."""
        for queue in (self._small, self._main):
            uses = queue.get(block)
            if uses is not None:
                queue[block] = min(_MOST_USES, uses + 1)
                return
        known = block in self._ghosts
        if known:
            del self._ghosts[block]
        while len(self._small) + len(self._main) >= self._capacity:
            if len(self._small) >= self._small_room or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        (self._main if known else self._small)[block] = 0

    def _evict_small(self) -> None:
        while self._small:
            block, uses = self._small.popitem(last=False)
            if not uses:
                self._remember(block)
                return
            self._main[block] = 0
            if len(self._main) > self._main_room:
                self._evict_main()

    def _evict_main(self) -> None:
        while self._main:
            block, uses = self._main.popitem(last=False)
            if not uses:
                return
            self._main[block] = uses - 1

    def _remember(self, block: int) -> None:
        self._ghosts[block] = None
        while len(self._ghosts) > self._main_room:
            self._ghosts.popitem(last=False)
