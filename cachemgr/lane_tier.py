"""The lane tier: lanes of finished sequences, kept for a while so that the same prefix is continued in place.

A retained lane still holds the KV of its whole blocks. When a prompt starts with the same blocks, the
scheduler takes the lane and writes on behind them: nothing is copied. Lanes are plain numbers here; what
they are is the engine's matter.

Threads: one owner (the step loop), no lock.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from cachemgr.contract import BlockHash


@dataclass(frozen=True, slots=True)
class _Retained:
    hashes: tuple[BlockHash, ...]
    since: float


class LaneTier:
    """Retained lanes, oldest first. `now` is time.monotonic() seconds throughout."""

    def __init__(self, *, ttl_s: float = 30.0) -> None:
        self._ttl_s = ttl_s
        self._retained: dict[int, _Retained] = {}

    def __len__(self) -> int:
        return len(self._retained)

    def retain(self, lane: int, hashes: Sequence[BlockHash], *, now: float) -> None:
        """Keep `lane`, whose first len(hashes) blocks are valid and have these names.

        A lane is retained once.
        """
        assert lane not in self._retained, f"lane {lane} is retained already"
        self._retained[lane] = _Retained(tuple(hashes), now)

    def match(self, hashes: Sequence[BlockHash], *, now: float) -> tuple[int, int] | None:
        """The lane with the longest common prefix (the one retained last among equals) and its blocks.

        None if there is no common block. Changes nothing: `take` the lane to use it.
        """
        best: tuple[int, int] | None = None
        for lane, retained in self._retained.items():
            if now - retained.since >= self._ttl_s:
                continue
            common = _common_blocks(retained.hashes, hashes)
            if common and (best is None or common >= best[1]):
                best = (lane, common)
        return best

    def take(self, lane: int) -> None:
        """The caller uses the lane from now on. KeyError if it is not retained."""
        del self._retained[lane]

    def expire(self, now: float) -> list[int]:
        """Let go of lanes whose time is over; the caller releases them."""
        over = [lane for lane, retained in self._retained.items() if now - retained.since >= self._ttl_s]
        for lane in over:
            del self._retained[lane]
        return over


def _common_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Length of the common prefix by bisection: in a hash chain, equal at i means equal up to i."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda i: one[i] != other[i])
