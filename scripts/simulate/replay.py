"""A trace through a cache, timed: hits, and the processor time of one block.

Only requests are timed, not the reading of the trace nor the making of what a cache is asked with; the
processor time of this thread does not count what others do meanwhile.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.simulate.contract import Contestant
from scripts.simulate.policies import CONTESTANTS
from scripts.simulate.trace import Trace

_TOGETHER = 256
"""Requests made ready at once: few, so that memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one policy did at one capacity."""

    policy: str
    capacity: int
    blocks: int
    """Block accesses."""
    hits: int
    touch_us: float
    """Mean processor microseconds a block access."""

    @property
    def block_hit_rate(self) -> float:
        """Hits of all block accesses."""
        return self.hits / self.blocks


def replay(
    trace: Trace,
    policy: str,
    *,
    capacity: int,
    advance: Callable[[int], None] = lambda blocks: None,
    clock: Callable[[], float] = time.thread_time,
) -> Measured:
    """One policy at one capacity, from an empty cache; `advance` hears of blocks as they pass."""
    contestant: Contestant[Any] = CONTESTANTS[policy]
    # room for more than all there is changes nothing, and must not cost memory
    cache = contestant.cache(min(capacity, trace.distinct), trace)
    hits, spent_s = 0, 0.0
    for first in range(0, trace.requests, _TOGETHER):
        requests = range(first, min(first + _TOGETHER, trace.requests))
        chains = [contestant.chain(trace, request) for request in requests]
        begun = clock()
        for chain in chains:
            hits += cache.request(chain)
        spent_s += clock() - begun
        advance(sum(map(len, chains)))
    return Measured(policy, capacity, trace.blocks, hits, spent_s / trace.blocks * 1e6)
