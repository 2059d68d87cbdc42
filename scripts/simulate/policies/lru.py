"""LRU: what was used least recently goes first.

Mattson, Gecsei, Slutz, Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970.
"""

from collections import OrderedDict


class Lru:
    """A list by recency."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._recent: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._recent

    def touch(self, block: int) -> None:
        """See Policy."""
        recent = self._recent
        if block in recent:
            recent.move_to_end(block)
            return
        if len(recent) >= self._capacity:
            recent.popitem(last=False)
        recent[block] = None
