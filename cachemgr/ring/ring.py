"""Which node owns which segment: consistent hashing with vnodes, failure domains and moved vnodes.

Every vnode has a point; it has the positions after the point before it, up to and with its own. A position
beyond the last point belongs to the first vnode. Vnodes on the same point lie there in the order of their
names' nodes; the first has the positions, the others follow it.

Invariants: immutable; equal states give equal rings on every node. Any thread.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable
from itertools import chain

import numpy as np
import numpy.typing as npt

from cachemgr.ring.names import NodeId, Version, VnodeId, vnode_id
from cachemgr.ring.owner_table import owner_rows
from cachemgr.ring.points import vnode_points
from cachemgr.ring.state import MAX_REPLICAS, RingState

Arcs = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Lowest and highest position of each arc, uint64 [N] each."""

_WIDTH = 1 + MAX_REPLICAS
_TOP = np.uint64((1 << 64) - 1)


class Ring:
    """A state, ready for look-ups. `points` gives those of vnodes 0 … count − 1 of a node.

    Building it takes about a microsecond per vnode: for hundreds of nodes not where others wait.
    """

    def __init__(
        self,
        state: RingState,
        *,
        points: Callable[[str, int], npt.NDArray[np.uint64]] = vnode_points,
    ) -> None:
        self._state = state
        self._version = state.version
        counts = [node.vnodes for node in state.nodes]
        unsorted = np.concatenate(
            [points(node.id, count) for node, count in zip(state.nodes, counts, strict=True) if count]
        )
        order = np.argsort(unsorted, kind="stable")  # equal points: by node id, then number
        self._sorted = unsorted[order]
        self._shift, near, self._most = _stretches(self._sorted)
        self._near = array("i", near.astype(np.intc).tobytes())
        self._points = array("Q", np.append(self._sorted, np.full(self._most, _TOP)).tobytes())
        self._homes = np.repeat(np.arange(len(counts)), counts)[order]
        self._numbers = np.concatenate([np.arange(count) for count in counts])[order]
        self._names = [NodeId(node.id) for node in state.nodes]
        self._owners = self._moved(order, counts)
        self._domains = _numbered([node.failure_domain for node in state.nodes])
        self._placed = frozenset(self._owners)
        self._columns = self._table(_WIDTH)
        self._named = self._named_tables()

    def _moved(self, order: npt.NDArray[np.intp], counts: list[int]) -> list[int]:
        """The node of each vnode of the ring, overrides applied unless one of the two nodes is gone."""
        owners = self._homes.copy()
        if self._state.overrides:
            at = {node.id: index for index, node in enumerate(self._state.nodes)}
            start = np.concatenate([[0], np.cumsum(counts)])
            place = np.empty(len(order), np.intp)
            place[order] = np.arange(len(order))
            for vnode, target in self._state.overrides.items():
                home, _, number = vnode.rpartition("#")
                if counts[at[home]] and counts[at[target]]:
                    owners[place[start[at[home]] + int(number)]] = at[target]
        return owners.tolist()  # type: ignore[no-any-return]

    def _table(self, width: int) -> npt.NDArray[np.int32]:
        """The first owners of each vnode: int32 [at most width, vnodes], primaries first."""
        rows = owner_rows(self._owners, self._domains, width)
        flat = np.fromiter(chain.from_iterable(rows), np.int32, len(rows) * len(rows[0]))
        return np.ascontiguousarray(flat.reshape(len(rows), -1).T)

    def _named_tables(self) -> list[list[tuple[NodeId, ...]]]:
        """For each n the first n owners of each vnode, and of what lies beyond the last: [n][vnodes + 1]."""
        names = np.array(self._names, object)
        columns = [names[column].tolist() for column in self._columns]
        tables: list[list[tuple[NodeId, ...]]] = [[()] * (len(self._owners) + 1)]
        for n in range(1, _WIDTH + 1):
            table = list(zip(*columns[:n], strict=True))
            tables.append([*table, table[0]])
        return tables

    @property
    def state(self) -> RingState:
        """What it was built from."""
        return self._state

    @property
    def version(self) -> Version:
        """That of the state."""
        return self._version

    @property
    def replicas(self) -> int:
        """Copies beside the primary."""
        return self._state.replicas

    @property
    def placed(self) -> int:
        """How many nodes have vnodes: there are never more owners, extra ones included."""
        return len(self._placed)

    def owners(self, position: int, n: int) -> tuple[NodeId, ...]:
        """The first `n` owners of a position (0 … 2^64 − 1), primary first; fewer if there are fewer nodes.

        In distinct failure domains while there are enough, then distinct nodes. More owners begin with fewer.
        """
        at = self._near[position >> self._shift]
        if at < 0:
            at = bisect_left(self._points, position, ~at, ~at + self._most)
        try:
            return self._named[n][at]
        except IndexError:  # more than are prepared, which is rare: asking first would cost every look-up
            return tuple([self._names[node] for node in self._walk(at, n)])

    def vnode_at(self, position: int) -> tuple[VnodeId, int, NodeId]:
        """The vnode that has a position, its point, and the node that has it (the primary)."""
        at = bisect_left(self._points, position) % len(self._sorted)
        vnode = vnode_id(self._names[self._homes[at]], int(self._numbers[at]))
        return vnode, self._points[at], self._names[self._owners[at]]

    def arcs(self, node: str, n: int) -> Arcs:
        """Where `node` is among the first `n` owners; both ends included, sorted, disjoint, none wraps."""
        has = self._has(node, n)
        low = np.concatenate([np.zeros(1, np.uint64), self._sorted + np.uint64(1)])
        high = np.append(self._sorted, _TOP)
        has = np.append(has, has[:1])  # the first vnode has what lies beyond the last point
        real = np.concatenate([[True], self._sorted[1:] != self._sorted[:-1], self._sorted[-1:] != _TOP])
        low, high, has = low[real], high[real], has[real]
        edge = np.diff(np.concatenate([[False], has, [False]]).astype(np.int8))
        return low[np.flatnonzero(edge == 1)], high[np.flatnonzero(edge == -1) - 1]

    def owned(self, positions: npt.NDArray[np.uint64], node: str, n: int) -> npt.NDArray[np.bool_]:
        """Which of these positions have `node` among their first `n` owners: bool [N]."""
        has = self._has(node, n)
        at = np.searchsorted(self._sorted, positions.astype(np.uint64, copy=False))
        at[at == len(has)] = 0
        return has[at]

    def _has(self, node: str, n: int) -> npt.NDArray[np.bool_]:
        """For each vnode whether `node` is among the first `n` owners of its positions."""
        if node not in self._names or n < 1:
            return np.zeros(len(self._sorted), np.bool_)
        columns = self._columns if n <= _WIDTH else self._table(min(n, len(self._placed)))
        return (columns[:n] == self._names.index(NodeId(node))).any(axis=0)  # type: ignore[no-any-return]

    def _walk(self, start: int, n: int) -> list[int]:
        """The first `n` owners for the vnode at `start`, as `owner_rows` has them, for any n."""
        n = min(n, len(self._placed))
        wanted = min(n, len({self._domains[node] for node in self._placed}))
        seen: dict[int, None] = {}
        apart: dict[int, int] = {}
        for at in range(start, start + len(self._owners)):
            node = self._owners[at % len(self._owners)]
            if node not in seen:
                seen[node] = None
                apart.setdefault(self._domains[node], node)
                if len(seen) >= n and len(apart) >= wanted:
                    break
        first = list(apart.values())
        taken = set(first)
        return [*first, *[node for node in seen if node not in taken]][:n]


def _stretches(points: npt.NDArray[np.uint64]) -> tuple[int, npt.NDArray[np.int64], int]:
    """Nearly where the vnode of a position is: the ring in stretches of 2^shift positions, four per vnode.

    The shift; for each stretch the vnode that has all of it or, where points lie in it, ~ the first of them;
    the most points that lie in one stretch.
    """
    shift = 64 - (len(points) - 1).bit_length() - 2
    lowest = np.arange(1 << (64 - shift), dtype=np.uint64) << np.uint64(shift)
    first = np.searchsorted(points, lowest)
    within = np.diff(np.append(first, len(points)))
    return shift, np.where(within, ~first, first), int(within.max())


def _numbered(names: list[str]) -> list[int]:
    """A number for each, equal for equal names."""
    known: dict[str, int] = {}
    return [known.setdefault(name, len(known)) for name in names]
