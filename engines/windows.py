"""Rounds the shapes of a step up to few sizes, so that each is warmed up, and recorded as a graph, once.

A step attends to the *window*: the first W positions of its lanes. A decode runs its first n *rows*, idle
ones included. Both are rounded up: W to a power of two of at least 256, n to a power of two up to 8 and to
a multiple of 8 beyond.
"""

LEAST_WINDOW = 256
MAX_GRAPHS = 64
"""Decodes that are kept as graphs at once, one for each (rows, window)."""

_EVEN_ROWS = 8


def windows(positions: int) -> tuple[int, ...]:
    """Every window in lanes of `positions` positions, smallest first; the last one is all of them."""
    sizes = []
    size = LEAST_WINDOW
    while size < positions:
        sizes.append(size)
        size *= 2
    return (*sizes, positions)


def window_for(used: int, positions: int) -> int:
    """The smallest window that holds the first `used` positions."""
    assert 1 <= used <= positions, f"{used} of {positions} positions"
    return min(max(LEAST_WINDOW, 1 << (used - 1).bit_length()), positions)


def row_counts(lanes: int) -> tuple[int, ...]:
    """Every number of rows a decode over `lanes` lanes runs with, smallest first."""
    return tuple(sorted({rows_for(rows, lanes) for rows in range(1, lanes + 1)}))


def rows_for(used: int, lanes: int) -> int:
    """The smallest number of rows that holds the first `used`."""
    assert 1 <= used <= lanes, f"{used} of {lanes} rows"
    even = -(-used // _EVEN_ROWS) * _EVEN_ROWS
    return min(even if used > _EVEN_ROWS else 1 << (used - 1).bit_length(), lanes)
