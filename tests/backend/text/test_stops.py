from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.text.stops import StopMatcher, StopWords


def first_start(text: str, words: list[str]) -> int | None:
    """The rule, plainly: where the earliest occurrence of any word starts."""
    starts = [text.find(word) for word in words if word and word in text]
    return min(starts, default=None)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=14),
    words=st.lists(st.text("abc", max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 14), max_size=5),
)
def test_any_split_finds_the_earliest_start(text: str, words: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(StopWords(words))
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    decided = False
    for begin, end in pairwise(borders):
        decided = matcher.feed(text[begin:end])
        if decided:
            break
        known = first_start(text[:end], words)
        assert matcher.start == known
        assert matcher.clear <= (end if known is None else known)
        assert not any(text.startswith(word, i) for word in words if word for i in range(matcher.clear))
    assert matcher.start == first_start(text, words)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=10),
    words=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_holds_back_no_more_than_what_may_become_a_stop_word(text: str, words: list[str]) -> None:
    matcher = StopMatcher(StopWords(words))
    if not matcher.feed(text) and matcher.start is None:
        tails = [n for n in range(1, len(text) + 1) for word in words if word.startswith(text[-n:])]
        assert matcher.clear == len(text) - max(tails, default=0)


@pytest.mark.parametrize("words", [[], [""], ["", ""]])
def test_empty_words_stop_nothing(words: list[str]) -> None:
    assert not StopWords(words)


def test_an_occurrence_waits_for_one_that_starts_earlier() -> None:
    words = StopWords(["abcd", "b"])
    matcher = StopMatcher(words)
    assert not matcher.feed("xab")
    assert matcher.start == 2
    assert matcher.clear == 1
    assert matcher.feed("cd")
    assert matcher.start == 1
    other = StopMatcher(words)
    assert not other.feed("xab")
    assert other.feed("x")
    assert other.start == 2
