"""LFU: what was used least often goes first, of equals the least recent.

Shah, Mitra, Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme", 2010. Uses are
counted while a block is here and forgotten with it (in-cache LFU, as there).
"""

from collections import OrderedDict, defaultdict


class Lfu:
    """One list by recency for each number of uses."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._uses: dict[int, int] = {}
        self._lists: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._fewest = 1

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def touch(self, block: int) -> None:
        """See Policy."""
        uses = self._uses.get(block, 0)
        if uses:
            self._leave(block, uses)
        else:
            if len(self._uses) >= self._capacity:
                self._evict()
            self._fewest = 1
        self._uses[block] = uses + 1
        self._lists[uses + 1][block] = None

    def _leave(self, block: int, uses: int) -> None:
        there = self._lists[uses]
        del there[block]
        if not there:
            del self._lists[uses]
            if uses == self._fewest:
                self._fewest = uses + 1

    def _evict(self) -> None:
        there = self._lists[self._fewest]
        victim, _ = there.popitem(last=False)
        if not there:
            del self._lists[self._fewest]
        del self._uses[victim]
