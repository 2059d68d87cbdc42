"""Sets of ring positions as sorted arcs: union, difference, intersection, and splitting them by owners.

An arc is (low, high), both included, 0 ≤ low ≤ high < 2^64; one that goes round the top of the ring is two.
Positions are Python ints here: uint64 arithmetic wraps exactly where an arc ends.

Invariants: the arcs of a set are sorted, disjoint and not adjacent.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachemgr.ring import NodeId, Ring

TOP = (1 << 64) - 1
Arc = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ArcSet:
    """A set of positions; build it with `arcs_of`, `owned_arcs` or from other sets."""

    pairs: tuple[Arc, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __contains__(self, position: int) -> bool:
        first, last = 0, len(self.pairs)
        while first < last:
            middle = (first + last) // 2
            if self.pairs[middle][1] < position:
                first = middle + 1
            else:
                last = middle
        return first < len(self.pairs) and self.pairs[first][0] <= position

    def __or__(self, other: "ArcSet") -> "ArcSet":
        return arcs_of((*self.pairs, *other.pairs))

    def __and__(self, other: "ArcSet") -> "ArcSet":
        return self - (WHOLE - other)

    def __sub__(self, other: "ArcSet") -> "ArcSet":
        left: list[Arc] = []
        holes = iter(other.pairs)
        hole = next(holes, None)
        for low, high in self.pairs:
            while hole is not None and hole[1] < low:
                hole = next(holes, None)
            while hole is not None and hole[0] <= high:
                if hole[0] > low:
                    left.append((low, hole[0] - 1))
                low = hole[1] + 1
                if low > high:
                    break
                hole = next(holes, None)
            if low <= high:
                left.append((low, high))
        return ArcSet(tuple(left))

    def arrays(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Low and high ends, uint64 [N] each."""
        pairs = np.array(self.pairs, dtype=np.uint64).reshape(-1, 2)
        return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])

    def parts(self, arcs: int) -> "Iterator[ArcSet]":
        """The same positions in sets of at most so many arcs."""
        for first in range(0, len(self.pairs), arcs):
            yield ArcSet(self.pairs[first : first + arcs])


WHOLE = ArcSet(((0, TOP),))
"""The whole ring."""

SLICES = tuple(ArcSet(((part << 58, ((part + 1) << 58) - 1),)) for part in range(64))
"""The whole ring in 64 parts, for work that should not list everything at once."""


def arcs_of(pairs: Iterable[Arc]) -> ArcSet:
    """The set of all positions in `pairs`, which may overlap and come in any order."""
    merged: list[Arc] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return ArcSet(tuple(merged))


def owned_arcs(ring: Ring, node: NodeId, owners: int | None = None) -> ArcSet:
    """Where `node` is among the first `owners` owners (default: primary and replicas); may be empty."""
    low, high = ring.arcs(node, owners or 1 + ring.replicas)
    return arcs_of(zip(low.tolist(), high.tolist(), strict=True))


def split_at_vnodes(arcs: ArcSet, rings: Sequence[Ring]) -> Iterator[Arc]:
    """The same positions in arcs within which no ring of `rings` has two vnodes.

    All positions of each then have the same owners by each of these rings: those of its high end.
    """
    for low, high in arcs.pairs:
        start = low
        while start <= high:
            end = min((_end_of_vnode(ring, start) for ring in rings), default=TOP)
            end = min(end, high)
            yield start, end
            start = end + 1


def _end_of_vnode(ring: Ring, position: int) -> int:
    """The last position, before the top, that belongs to the vnode of `position`."""
    _, point, _ = ring.vnode_at(position)
    return int(point) if point >= position else TOP
