"""Any text through any kind of tokenizer: its tokens give it back, whole or as a stream."""

from backend.text import TextModel
from tests.backend.text import tokenizers_made as made
from tests.fuzz.source import Source, chunked

_EXACT = 1
"""How many of the kinds lose nothing: all bytes are tokens, and there is no normalizer."""
_KINDS: tuple[TextModel, ...] = tuple(
    made.text_model(tokenizer)
    for tokenizer in (
        made.byte_level(), made.byte_fallback(strip=True), made.byte_fallback(strip=False),
        made.metaspace("always"),
    )
)  # fmt: skip
EXAMPLES = (
    *(b"\x00\x00" + text.encode() for text in made.TEXTS[:24]),
    *(bytes([kind, 2]) + chunked(b"END") + chunked(b"\n") + "x END y 👍🏽 é\n".encode() for kind in range(4)),
    b"\x00\x01" + chunked(b"") + b"\xff\xfe\x00" * 40,
    b"\x00\x00" + b" " * 3000,
    b"\x00\x00" + "\u0301".encode() * 1000,
    b"\x02\x00" + b"<0x" * 500,
)


def target(data: bytes) -> None:
    source = Source(data)
    kind = source.byte() % len(_KINDS)
    text_model = _KINDS[kind]
    stops = [source.chunk().decode("utf-8", "replace") for _ in range(source.byte() % 4)]
    text = source.rest().decode("utf-8", "replace")
    ids = text_model.encode(text)
    assert ids.ndim == 1
    assert (ids >= 0).all()
    assert len(ids) <= 4 * len(text.encode()) + 8
    whole = text_model.decode(ids)
    if kind < _EXACT and not any(special in text for special in ("<|start|>", "<|eos|>")):
        assert whole == text, "a text that does not come back"
    _stream(text_model, ids.tolist(), whole, [stop for stop in stops if stop])


def _stream(text_model: TextModel, ids: list[int], whole: str, stops: list[str]) -> None:
    """What is streamed is the whole text, cut at the first stop word."""
    decoder = text_model.stream(stops)
    pieces = []
    for token in ids:
        pieces.append(decoder.push(token))
        if decoder.stopped:
            break
    else:
        pieces.append(decoder.finish())
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert "".join(pieces) == (whole[: min(found)] if found else whole)
