"""Windows and rows: the smallest size that holds a step, out of few."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.windows import LEAST_WINDOW, row_counts, rows_for, window_for, windows


@given(st.integers(1, 200_000).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))))
def test_a_window_is_the_smallest_that_holds_the_step(sizes: tuple[int, int]) -> None:
    positions, used = sizes
    every = windows(positions)
    assert window_for(used, positions) == min(size for size in every if size >= used)
    assert every == tuple(sorted(set(every)))
    assert every[-1] == positions
    assert all(size >= LEAST_WINDOW and size & (size - 1) == 0 for size in every[:-1])


@pytest.mark.parametrize(
    ("used", "positions", "window"),
    [(1, 4128, 256), (256, 4128, 256), (257, 4128, 512), (2049, 4128, 4096), (4097, 4128, 4128), (3, 96, 96)],
)
def test_windows_of_common_sizes(used: int, positions: int, window: int) -> None:
    assert window_for(used, positions) == window


@given(st.integers(1, 1024).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))))
def test_rows_hold_the_step_and_waste_less_than_half(sizes: tuple[int, int]) -> None:
    lanes, used = sizes
    rows = rows_for(used, lanes)
    assert used <= rows <= lanes
    assert rows < 2 * used
    assert rows == min(count for count in row_counts(lanes) if count >= used)


@pytest.mark.parametrize(
    ("lanes", "counts"),
    [(1, (1,)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))],
)
def test_row_counts(lanes: int, counts: tuple[int, ...]) -> None:
    assert row_counts(lanes) == counts


def test_what_does_not_fit_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="97 of 96 positions"):
        window_for(97, 96)
    with pytest.raises(AssertionError, match="0 of 4 rows"):
        rows_for(0, 4)
