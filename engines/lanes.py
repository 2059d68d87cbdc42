"""Hands out an engine's lanes: lowest free lane first, so that decode steps span as few rows as possible.

A lane is *active* (reserved), or free; a free one may be *retained*: it still holds the KV of a finished
sequence, which may be used again or overwritten. Who retains what, and for how long, is the lane tier's
business: the pool only avoids such lanes where that costs nothing.

Invariants
- A lane is reserved by at most one caller; active and free lanes together are all lanes.
- Retained lanes are free.

Threads: one owner (the step loop).
"""

from engines.contract import EngineSpec, LaneId


class LanePool:
    """The lanes of one engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self._max_tokens = spec.max_seq_len
        self._lanes = spec.lanes
        self._free: set[LaneId] = {LaneId(lane) for lane in range(spec.lanes)}
        self._retained: set[LaneId] = set()

    @property
    def free(self) -> int:
        """How many lanes can be reserved now, retained ones included."""
        return len(self._free)

    @property
    def active(self) -> int:
        """How many lanes are reserved."""
        return self._lanes - len(self._free)

    @property
    def retained(self) -> frozenset[LaneId]:
        """Free lanes that still hold the KV of a finished sequence."""
        return frozenset(self._retained)

    def widens(self, lane: LaneId) -> bool:
        """True if reserving `lane` makes decode steps span rows of lanes that nobody uses.

        They span all lanes up to the highest active one, so the lane next to it adds no row but its own.
        Nobody is slowed down while no lane is active.
        """
        highest = self._highest_active()
        return highest >= 0 and lane > highest + 1

    def reserve(self, tokens: int, *, prefer: LaneId | None = None) -> LaneId | None:
        """Take a lane with room for `tokens` positions; None if none is free or none is that long.

        `prefer` is taken if it is free (its retained KV is about to be used again). Else the lane that
        raises the highest active lane least; among those one without retained KV; among those the lowest.
        """
        assert tokens >= 1, f"reserve({tokens})"
        if tokens > self._max_tokens or not self._free:
            return None
        lane = prefer if prefer is not None and prefer in self._free else self._cheapest()
        self._free.remove(lane)
        self._retained.discard(lane)
        return lane

    def release(self, lane: LaneId, *, retain: bool = False) -> None:
        """Give a reserved lane back; `retain` says that its KV may be used again until it is reserved."""
        assert 0 <= lane < self._lanes, f"lane {lane} of {self._lanes}"
        assert lane not in self._free, f"lane {lane} is not reserved"
        self._free.add(lane)
        if retain:
            self._retained.add(lane)

    def forget(self, lane: LaneId) -> None:
        """The KV of a free lane is of no use any more (expired, or its sequence moved)."""
        self._retained.discard(lane)

    def _cheapest(self) -> LaneId:
        highest = self._highest_active()
        return min(self._free, key=lambda lane: (max(lane, highest), lane in self._retained, lane))

    def _highest_active(self) -> int:
        """−1 without one."""
        return max((lane for lane in range(self._lanes) if lane not in self._free), default=-1)
