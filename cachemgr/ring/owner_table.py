"""Which nodes own the arc of each vnode, first to last: the walk along the ring, done once for all vnodes.

From a vnode on, the ring is walked upwards. First comes the first node of each failure domain, in the order
in which the walk meets them; then, if more are wanted than there are domains, every other node in that order.

Source: a walk from vnode i is the walk from i + 1 with the node of i moved to the front (as in move-to-front
coding), so one pass downwards gives all of them, in time that does not depend on how domains are spread.
"""

from collections.abc import Sequence

Walk = tuple[int, ...]
"""Nodes in the order in which a walk meets them."""


def owner_rows(owners: Sequence[int], domains: Sequence[int], width: int) -> list[Walk]:
    """The first `width` owners (fewer if there are not as many nodes) for each vnode of `owners`.

    `owners`: node of each vnode, in the order of the ring; `domains`: failure domain of each node.
    """
    rows = _first_seen(owners, domains, width)
    apart = len(rows[0])
    if apart == width:
        return rows
    every = _first_seen(owners, range(len(domains)), width)
    return [_filled(row, walk, width) for row, walk in zip(rows, every, strict=True)]


def _first_seen(owners: Sequence[int], kinds: Sequence[int], width: int) -> list[Walk]:
    """For each vnode the first node of each of the first `width` kinds that a walk from there meets."""
    rows: list[Walk] = [()] * len(owners)
    front: Walk = ()
    front_kinds: Walk = ()
    kept = width - 1
    for _ in range(2):  # the second time round completes what lies just before the start of the ring
        for at in range(len(owners) - 1, -1, -1):
            node = owners[at]
            kind = kinds[node]
            if kind not in front_kinds:
                front = (node, *front[:kept])
                front_kinds = (kind, *front_kinds[:kept])
            elif front[0] != node:
                others = [other for other in front if kinds[other] != kind]
                front = (node, *others)
                front_kinds = (kind, *[kinds[other] for other in others])
            if rows[at] == front:
                break
            rows[at] = front
    return rows


def _filled(row: Walk, walk: Walk, width: int) -> Walk:
    return (*row, *[node for node in walk if node not in row])[:width]
