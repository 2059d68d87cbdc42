"""Small inputs that ask for much: depth, digits, lengths and counts cost no more than the bytes that came."""

import json
import re
import struct
import tracemalloc
from collections.abc import Iterator
from re import _parser
from typing import Any

import numpy as np
import pytest

from backend.errors import InvalidRequest
from backend.facade import _SCHEME
from backend.parsing.values import _REAL, _WHOLE
from backend.strict_json import MAX_DEPTH, read_json
from backend.text.chat import _NAME, _ROLE, ChatTemplate, read_messages
from backend.text.stops import StopMatcher, StopWords
from cachemgr.cluster.bulk.frames import FROM_CLIENT, MalformedFrame, parse_head
from cachemgr.cluster.bulk.messages import Ended, Places, Request, decode
from cachemgr.cluster.control.messages import METHODS
from cachemgr.cluster.control.packed import MessageError
from cachemgr.redis_client.redis_py import BoundedReader, ProtocolError, Reader
from cachemgr.ring.state import _ID
from tests.backend.parsing.requests_made import LIMITS, hello, one, parse, strings

MOST_NBYTES = 48 << 20
MANY = b"\xff" * 4
"""As a length in msgpack."""


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """What Python allocates meanwhile stays far below what the inputs ask for."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_NBYTES, f"{peak} bytes"


DOCUMENTS = {
    "lists": "[" * 32_000 + "]" * 32_000,
    "objects": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "digits": "9" * 65_536,
    "just too deep": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    "a key twice": "{" + ",".join(f'"{at % 500}": 1' for at in range(2000)) + "}",
    "a lone surrogate": '"' + "x" * 60_000 + '\\ud800"',
    "infinite": '{"a": [Infinity]}',
}


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_of_64_kib(document: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_json(document, field="messages")
    assert len(str(refused.value)) < 300


NUMBERS = {
    "of 5000 digits": 10**5000,
    "below all": -(10**30),
    "2^64": 2**64,
    "a million digits": "9" * 10**6,
    "10^30": "1" + "0" * 30,
    "infinite": float("inf"),
    "infinite as text": "1e9999",
}


@pytest.mark.parametrize("field", ["timeout", "seed", "max_tokens", "min_tokens", "top_k", "temperature"])
@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_numbers_beyond_all_limits(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: must be"):
        parse(hello(), {field: value})


def test_the_longest_timeout_is_a_time() -> None:
    assert parse(hello(), {"timeout": 2**63 - 1}).deadline == pytest.approx(1000.0 + 2**63 / 1e6)
    with pytest.raises(InvalidRequest, match=r"^timeout: must be"):
        parse(hello(), {"timeout": 2**63})


def test_ten_million_tokens_are_counted_before_they_are_looked_at() -> None:
    tokens = np.zeros(10**7, np.int32)
    tracemalloc.clear_traces()  # they are there, whoever sent them
    tracemalloc.reset_peak()
    with pytest.raises(InvalidRequest, match=r"^input_ids: must have 1 to"):
        parse({"input_ids": tokens}, {})


@pytest.mark.parametrize("kind", [Request, Places, Ended])
@pytest.mark.parametrize("lie", [b"\xdd" + MANY, b"\xdf" + MANY, b"\x95\xc6" + MANY])
def test_bodies_that_lie_about_their_length(kind: type, lie: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode(lie, kind)


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("lie", [b"\xdf" + MANY, b"\x81\xdb" + MANY, b"\x81\xa5names\xc6" + MANY])
def test_messages_that_lie_about_their_length(name: str, lie: bytes) -> None:
    for read in (METHODS[name].decode_request, METHODS[name].decode_reply):
        with pytest.raises(MessageError):
            read(lie)


@pytest.mark.parametrize("kind", sorted(FROM_CLIENT))
def test_a_frame_of_four_gigabytes_is_refused_by_its_head(kind: int) -> None:
    with pytest.raises(MalformedFrame, match=f"^bulk frame: length of kind {kind} must be"):
        parse_head(struct.pack("<IB3sI", 2**32 - 1, kind, b"", 1), FROM_CLIENT)


@pytest.mark.parametrize("split", range(1, 12))
@pytest.mark.parametrize("kind", [b"*", b"%", b"~", b">"])
def test_a_redis_that_announces_two_billion_parts(kind: bytes, split: int) -> None:
    """Wherever it is cut: hiredis would make room for all of them."""
    reader, data = BoundedReader(Reader()), kind + b"2147483647\r\n"

    def read() -> None:
        for part in (data[:split], data[split:]):
            reader.feed(part)
            reader.gets()

    with pytest.raises(ProtocolError):
        read()


PATTERNS = {"whole": _WHOLE, "real": _REAL, "role": _ROLE, "name": _NAME, "bearer": _SCHEME, "key": _ID}


def endless(part: Any) -> bool:
    """Does a parsed pattern repeat without a bound what may itself be repeated?"""
    if isinstance(part, tuple) and len(part) == 2 and str(part[0]) in ("MAX_REPEAT", "MIN_REPEAT"):
        _, most, what = part[1]
        single = len(what) == 1 and str(what[0][0]) in ("LITERAL", "NOT_LITERAL", "IN", "ANY")
        return (most > 10_000 and not single) or endless(what)
    items = part if isinstance(part, list | tuple) or hasattr(part, "data") else ()
    return any(endless(item) for item in items)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_patterns_over_what_strangers_send_cannot_explode(pattern: "re.Pattern[str]") -> None:
    """By their form, not by the clock: nothing is repeated without end but a single character."""
    assert not endless(_parser.parse(pattern.pattern))


def test_an_exploding_pattern_is_found() -> None:
    assert endless(_parser.parse("(a+)+b"))
    assert endless(_parser.parse("x(?:(ab)*)?"))
    assert not endless(_parser.parse(" *[a-z]{1,3}(?:ab){0,5}"))


def test_stop_words_that_nearly_match_cost_a_few_steps_a_character() -> None:
    """Each step into the automaton allows one step back: counted, not timed."""
    looks = 0

    class Counted(dict[str, int]):
        def get(self, key: str, default: int | None = None) -> int | None:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(key)

    words = StopWords(["a" * 255 + "b", *("a" * at + "c" for at in range(1, 60))])
    words.steps = [Counted(step) for step in words.steps]
    text = "a" * 5000
    matcher = StopMatcher(words)
    assert not matcher.feed(text)
    assert looks < 4 * len(text)


HOSTILE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_message_is_never_run_as_a_template(text: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", special_tokens={})
    messages = read_messages(json.dumps([{"role": "user", "content": text}]))
    assert template.render(messages, max_bytes=1000) == text


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_that_reaches_out_or_grows_is_stopped(source: str) -> None:
    """The template is signed; the sandbox and the bounds hold all the same."""
    now = iter(range(10**6))
    template = ChatTemplate(source, special_tokens={}, clock=lambda: next(now) / 1e3)
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        template.render([{"role": "user", "content": "x"}], max_bytes=10_000)


def test_a_prompt_is_measured_before_it_is_read() -> None:
    most = LIMITS.max_prompt_bytes
    with pytest.raises(InvalidRequest, match=f"^text_input: must have at most {most} bytes"):
        parse({"text_input": strings("x" * 10**7)}, {})
    with pytest.raises(InvalidRequest, match=r"^seed: must be"):
        parse({**hello(), "seed": one(2**64 - 1, np.float32)}, {})
