"""Retained lanes: the longest common prefix wins, a lane leaves once, time runs out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr import BlockHash, LaneTier


def prompt(text: str) -> list[BlockHash]:
    """A chain of one hash per letter: equal at i if and only if equal up to i."""
    return [BlockHash(text[: end + 1].encode().rjust(16, b"\0")) for end in range(len(text))]


def test_the_longest_common_prefix_wins_and_the_latest_among_equals() -> None:
    lanes = LaneTier()
    lanes.retain(3, prompt("abc"), now=0)
    lanes.retain(5, prompt("abcdef"), now=0)
    lanes.retain(7, prompt("xyz"), now=0)
    assert lanes.match(prompt("abcdxx"), now=1) == (5, 4)
    assert lanes.match(prompt("abcdefgh"), now=1) == (5, 6)
    assert lanes.match(prompt("abx"), now=1) == (5, 2)
    assert lanes.match(prompt("x"), now=1) == (7, 1)
    assert lanes.match(prompt("q"), now=1) is None
    assert lanes.match([], now=1) is None
    assert len(lanes) == 3


@given(st.lists(st.text("ab", max_size=6), max_size=6), st.text("ab", max_size=6))
def test_match_equals_a_plain_comparison(retained: list[str], asked: str) -> None:
    lanes = LaneTier()
    for lane, text in enumerate(retained):
        lanes.retain(lane, prompt(text), now=0)

    def common(text: str) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(text, asked, strict=False)) if a != b),
            min(len(text), len(asked)),
        )

    best = max((common(text) for text in retained), default=0)
    found = lanes.match(prompt(asked), now=1)
    assert (found is None) == (best == 0)
    if found is not None:
        assert found[1] == best == common(retained[found[0]])


def test_a_lane_leaves_once() -> None:
    lanes = LaneTier()
    for lane in (1, 2):
        lanes.retain(lane, prompt("ab"), now=0)
    lanes.take(2)
    lanes.take(1)
    assert lanes.match(prompt("ab"), now=0) is None
    with pytest.raises(KeyError):
        lanes.take(1)


def test_time_runs_out() -> None:
    lanes = LaneTier(ttl_s=30)
    lanes.retain(1, prompt("ab"), now=100)
    lanes.retain(2, prompt("ab"), now=120)
    assert lanes.expire(now=129.9) == []
    assert lanes.match(prompt("ab"), now=131) == (2, 2), "an expired lane is not offered, swept or not"
    assert lanes.expire(now=130) == [1]
    assert lanes.expire(now=130) == []
    assert len(lanes) == 1
