"""Optimum: knows the future, and no policy can have more block hits.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966, with
bypass: a block that would be the first to go is not taken in.

What is optimal, exactly: of all ways to hold at most `capacity` blocks between two requests, chosen from
those held before and those of the request, this one has the greatest sum of hits, a hit being a block of the
longest prefix of a request that is held when it comes. To be hit, a block must be held over one whole
interval between two of its uses; so the question is which intervals to hold, at most `capacity` at any time,
and holding those that end soonest is the answer for intervals. It is one for prefixes, too: where a block is
used so is all before it, hence a parent's interval never ends after its child's, and of equals the deeper
one is let go.

A policy that must take in every block, as all others here do, may stay below it even if it knew the future.
"""

import heapq
from array import array
from collections.abc import Sequence

from scripts.simulate.trace import Trace

_NEVER = -1
_Entry = tuple[int, int, int]
"""Minus the next request that uses it, minus its depth, block: the first to be let go is the least."""


class Optimum:
    """Replays the very trace it was made for, once, from the start."""

    def __init__(self, capacity: int, trace: Trace) -> None:
        self._capacity = capacity
        self._next_uses = _next_uses(trace)
        self._position = 0
        self._here: dict[int, _Entry] = {}
        self._heap: list[_Entry] = []

    def request(self, chain: Sequence[int]) -> int:
        """See Cache."""
        here = self._here
        hit = 0
        for block in chain:
            if block not in here:
                break
            hit += 1
        for depth, block in enumerate(chain):
            next_use = self._next_uses[self._position]
            self._position += 1
            if next_use == _NEVER:
                here.pop(block, None)
            else:
                entry = here[block] = (-next_use, -depth, block)
                heapq.heappush(self._heap, entry)
        self._let_go()
        return hit

    def _let_go(self) -> None:
        here = self._here
        while len(here) > self._capacity:
            entry = heapq.heappop(self._heap)
            if here.get(entry[2]) is entry:
                del here[entry[2]]
        if len(self._heap) > 2 * len(here) + 1024:  # what was used since, or is never used again
            self._heap = list(here.values())
            heapq.heapify(self._heap)


def _next_uses(trace: Trace) -> "array[int]":
    """For every access the request that uses the block next."""
    numbers, ends = trace.numbers, trace.ends
    coming = array("i", [_NEVER]) * trace.distinct
    found = array("i", [_NEVER]) * len(numbers)
    for request in range(len(ends) - 1, -1, -1):
        for position in range(ends[request - 1] if request else 0, ends[request]):
            found[position] = coming[numbers[position]]
            coming[numbers[position]] = request
    return found
