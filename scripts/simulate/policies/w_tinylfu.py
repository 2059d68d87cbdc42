"""W-TinyLFU: a window by recency, then a main part entered only by what was used more than what would go.

Einziger, Friedman, Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on Storage
2017. Window 1 % of the capacity; main part a segmented LRU, 80 % of it protected; counters up to 15, halved
every 10 × capacity accesses. Counts are exact here, where the paper's come from a sketch that may
overestimate.
"""

from collections import OrderedDict

_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8
_MOST_USES = 15
_SAMPLE = 10


class WTinyLfu:
    """Three lists by recency, and how often blocks were used of late, those that are not here included."""

    def __init__(self, capacity: int) -> None:
        self._window_room = max(1, int(capacity * _WINDOW_SHARE))
        self._main_room = capacity - self._window_room
        self._protected_room = int(self._main_room * _PROTECTED_SHARE)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._sample = _SAMPLE * capacity
        self._counted = 0

    def __contains__(self, block: int) -> bool:
        return block in self._window or block in self._protected or block in self._probation

    def touch(self, block: int) -> None:
        """See Policy."""
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            self._protect(block)
        else:
            self._window[block] = None
            if len(self._window) > self._window_room:
                self._admit(self._window.popitem(last=False)[0])

    def _count(self, block: int) -> None:
        self._uses[block] = min(_MOST_USES, self._uses.get(block, 0) + 1)
        self._counted += 1
        if self._counted >= self._sample:
            self._counted //= 2
            self._uses = {block: uses // 2 for block, uses in self._uses.items() if uses > 1}

    def _protect(self, block: int) -> None:
        del self._probation[block]
        self._protected[block] = None
        if len(self._protected) > self._protected_room:
            self._probation[self._protected.popitem(last=False)[0]] = None

    def _admit(self, candidate: int) -> None:
        """The window's least recent block goes into the main part, or out."""
        if len(self._probation) + len(self._protected) < self._main_room:
            self._probation[candidate] = None
            return
        there = self._probation or self._protected
        if not there:
            return  # a capacity of one block is all window
        victim = next(iter(there))
        if self._uses.get(candidate, 0) > self._uses.get(victim, 0):
            del there[victim]
            self._probation[candidate] = None
