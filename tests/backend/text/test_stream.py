from itertools import pairwise

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from backend.text import StopWords, StreamDecoder, TextModel
from backend.text.stream import MAX_CLUSTER
from backend.text.token_text import ByteLevelTable
from tests.backend.text.tokenizers_made import TEXTS

QUIET = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def cut(text: str, words: list[str]) -> str:
    """The rule, plainly: the text before the earliest occurrence of any stop word."""
    return text[: min([text.find(word) for word in words if word and word in text], default=len(text))]


def run(decoder: StreamDecoder, ids: list[int]) -> list[str]:
    return [*map(decoder.push, ids), decoder.finish()]


def stream(*pieces: bytes, stop: list[str] | None = None, min_tokens: int = 0) -> StreamDecoder:
    """A decoder over byte-level tokens 0, 1, 2 … with these bytes."""
    words = StopWords(stop or [])
    return StreamDecoder(ByteLevelTable.of(pieces).start(), words, min_tokens=min_tokens)


def deltas(*pieces: bytes, stop: list[str] | None = None) -> list[str]:
    return run(stream(*pieces, stop=stop), list(range(len(pieces))))


def check(pieces: list[bytes], stop: list[str]) -> None:
    """The invariants, for one split of one byte string."""
    whole = b"".join(pieces).decode("utf-8", errors="replace")
    expected = cut(whole, stop)
    decoder = stream(*pieces, stop=stop)
    out = run(decoder, list(range(len(pieces))))
    assert "".join(out) == expected
    assert decoder.stopped == (expected != whole or any(word and word in whole for word in stop))
    assert decoder.push(0) == "" or not decoder.stopped
    if not any(len(cluster) > MAX_CLUSTER for cluster in regex.findall(r"\X", whole)):
        borders = {0}
        for cluster in regex.findall(r"\X", whole):
            borders.add(max(borders) + len(cluster))
        place = 0
        for delta in out[:-1]:
            place += len(delta)
            assert not delta or whole[place - 1].isascii() or place in borders or place == len(expected)


rich = st.lists(
    st.sampled_from([*TEXTS, "🇩", "🇪", "\u200d", "\u0301", "\ufe0f", "👩", "STOP"]), max_size=6
).map("".join)
wild = st.one_of(
    rich.map(str.encode),
    st.lists(st.one_of(rich.map(str.encode), st.binary(max_size=4)), max_size=4).map(b"".join),
)


@st.composite
def splits(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes]:
    content = draw(data)
    places = draw(st.lists(st.integers(0, len(content)), max_size=12))
    borders = sorted({0, len(content), *places})
    return [content[a:b] for a, b in pairwise(borders)]


@settings(max_examples=600, deadline=None)
@given(
    pieces=splits(wild),
    stop=st.lists(st.sampled_from(["", "STOP", "TOP", "S", " ", "e", "\u0301", "🇪", "\ufffd", "日本"])),
)
def test_any_split_gives_the_whole_text_cut_at_its_stop_word(pieces: list[bytes], stop: list[str]) -> None:
    check(pieces, stop)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stop_words_taken_from_the_text_itself(data: st.DataObject) -> None:
    pieces = data.draw(splits(wild))
    whole = b"".join(pieces).decode("utf-8", errors="replace")
    place = st.integers(0, len(whole))
    ends = data.draw(st.lists(st.tuples(place, place), max_size=3))
    check(pieces, [whole[min(a, b) : max(a, b)] for a, b in ends])


@settings(max_examples=300, deadline=None)
@given(content=rich.map(str.encode), stop=st.lists(st.sampled_from(["STOP", "é", "👍", "the e"])))
def test_one_byte_a_token(content: bytes, stop: list[str]) -> None:
    check([content[i : i + 1] for i in range(len(content))], stop)


@QUIET
@given(
    numbers=st.lists(st.integers(0, 2**16), max_size=40),
    stop=st.lists(st.sampled_from(["a", "TOP", " the", "\ufffd", "<|"])),
)
def test_every_kind_of_tokenizer_streams_what_it_decodes(
    small: tuple[Tokenizer, TextModel], numbers: list[int], stop: list[str]
) -> None:
    tokenizer, text = small
    ids = [number % tokenizer.get_vocab_size() for number in numbers]
    expected = cut(tokenizer.decode(ids, skip_special_tokens=True), stop)
    assert "".join(run(text.stream(stop), ids)) == expected


@QUIET
@given(
    text=rich,
    extra=st.lists(st.integers(0, 49_151), max_size=5),
    stop=st.lists(st.sampled_from(["STOP", "end.", "語"])),
)
def test_the_real_tokenizer_streams_what_it_decodes(
    real_text: TextModel, real_tokenizer: Tokenizer, text: str, extra: list[int], stop: list[str]
) -> None:
    ids = [*real_text.encode_raw(text).tolist(), *extra]
    for length in {len(ids), len(ids) // 2}:  # also an output that ends anywhere
        expected = cut(real_tokenizer.decode(ids[:length], skip_special_tokens=True), stop)
        assert "".join(run(real_text.stream(stop), ids[:length])) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a", b"b"], ["a", "b", ""]),
        (["é".encode(), b"x"], ["", "éx", ""]),
        ([b"e", "\u0301".encode(), b"x"], ["e", "", "\u0301x", ""]),
        (["日".encode(), "本".encode()], ["", "日", "本"]),
        ([b"\xf0\x9f", b"\x91", b"\x8d", "🏽".encode(), b"!"], ["", "", "", "", "👍🏽!", ""]),
        (["👩".encode(), "\u200d".encode(), "👧".encode(), b" "], ["", "", "", "👩\u200d👧 ", ""]),
        (["🇩".encode(), "🇪".encode(), "🇫".encode(), "🇷".encode()], ["", "", "🇩🇪", "", "🇫🇷"]),
        ([b"ok \xf0\x9f\x91"], ["ok ", "\ufffd"]),
        ([b"\xff", b"a"], ["", "\ufffda", ""]),
        ([b"\xe6\x97", b"a"], ["", "\ufffda", ""]),
        ([b"", b"a", b""], ["", "a", "", ""]),
    ],
)
def test_text_comes_as_early_as_it_is_certain(pieces: list[bytes], expected: list[str]) -> None:
    assert deltas(*pieces) == expected


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["<|end|>"], [b"a<", b"b<|", b"en", b"d|>", b"c"], ["a", "<b", "", "", "", ""]),
        (["<|end|>"], [b"a<|end"], ["a", "<|end"]),
        (["ab", "abc"], [b"x", b"ab", b"c"], ["x", "", "", ""]),
        (["abc", "ab"], [b"xab"], ["x", ""]),
        (["abcd", "bc"], [b"xabc", b"z"], ["x", "a", ""]),
        (["abcd", "bc"], [b"xabc", b"d"], ["x", "", ""]),
        (["abcd", "bc"], [b"xabc"], ["x", "a"]),
        (["all of it"], [b"all", b" of", b" it"], ["", "", "", ""]),
        (["aab"], [b"a", b"a", b"a", b"b"], ["", "", "a", "", ""]),
        (["\ufffd"], [b"a\xf0\x9f"], ["a", ""]),
        ([" "], [b"one two"], ["one", ""]),
    ],
)
def test_stop_words_across_tokens(stop: list[str], pieces: list[bytes], expected: list[str]) -> None:
    assert deltas(*pieces, stop=stop) == expected


def test_a_stop_word_found_only_at_the_end_is_still_a_stop() -> None:
    decoder = stream(b"xabc", stop=["abcd", "bc"])
    assert decoder.push(0) == "x"
    assert not decoder.stopped
    assert decoder.finish() == "a"
    assert decoder.stopped
    assert decoder.finish() == ""


def test_endless_combining_marks_are_let_go() -> None:
    mark = "\u0301".encode()
    out = deltas(b"e", *[mark] * 500)
    assert "".join(out) == "e" + "\u0301" * 500
    assert max(map(len, out)) <= MAX_CLUSTER + 1
    assert sum(map(bool, out[:-1])) >= 7


def test_finish_twice_adds_nothing() -> None:
    decoder = stream("é".encode())
    assert [decoder.push(0), decoder.finish(), decoder.finish()] == ["", "é", ""]


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [
        (0, "a"),
        (1, "a"),
        (2, "aSTOPb"),  # ends in the second token: it does not count
        (3, "aSTOPb"),  # the second one ends in the fourth token, though it starts before
        (4, "aSTOPbSTOPc"),
        (9, "aSTOPbSTOPc"),
    ],
)
def test_a_stop_word_within_the_first_tokens_does_not_count(min_tokens: int, text: str) -> None:
    decoder = stream(b"aST", b"OPb", b"ST", b"OP", b"c", stop=["STOP"], min_tokens=min_tokens)
    assert "".join(run(decoder, [0, 1, 2, 3, 4])) == text
    assert decoder.stopped == (min_tokens < 4)


def test_a_character_cut_off_within_the_first_tokens_is_no_stop_word() -> None:
    decoder = stream(b"a", "é".encode()[:1], stop=["\ufffd"], min_tokens=4)
    assert "".join(run(decoder, [0, 1])) == "a\ufffd"
    assert not decoder.stopped
