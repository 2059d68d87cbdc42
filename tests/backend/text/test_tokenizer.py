import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from backend.errors import ConfigError
from backend.text import TextModel
from tests.backend.text.tokenizers_made import TEXTS, byte_level, with_decoder

ids_below = st.integers(0, 2**16)
QUIET = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_with(data: bytes, **changes: object) -> TextModel:
    arguments: dict[str, object] = {
        "chat_template": None, "eos_token_ids": (), "bos_token_id": None, "add_bos": False,
    } | changes  # fmt: skip
    return TextModel.from_release({"tokenizer.json": data}, **arguments)


@QUIET
@given(numbers=st.lists(ids_below, max_size=40))
def test_small_tokenizers_decode_as_the_library_does(
    small: tuple[Tokenizer, TextModel], numbers: list[int]
) -> None:
    tokenizer, text = small
    ids = [number % (tokenizer.get_vocab_size() + 3) for number in numbers]  # also ids that no token has
    assert text.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(
    run=st.lists(st.integers(3, 258), min_size=1, max_size=9),
    words=st.lists(st.integers(259, 280), max_size=3),
)
def test_runs_of_byte_tokens_decode_as_the_library_does(run: list[int], words: list[int]) -> None:
    from tests.backend.text.tokenizers_made import byte_fallback, text_model

    tokenizer = byte_fallback(strip=True)
    ids = [*words, *run, *words, *run]
    assert text_model(tokenizer).decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@QUIET
@given(ids=st.lists(st.integers(0, 49_151 + 2), max_size=60))
def test_the_real_tokenizer_decodes_as_the_library_does(
    real_text: TextModel, real_tokenizer: Tokenizer, ids: list[int]
) -> None:
    assert real_text.decode(ids) == real_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_the_real_tokenizer_goes_there_and_back(
    real_text: TextModel, real_tokenizer: Tokenizer, text: str
) -> None:
    ids = real_text.encode(text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert ids.tolist() == real_tokenizer.encode(text, add_special_tokens=False).ids
    assert real_text.decode(ids) == text


def test_special_tokens_are_read_in_prompts_and_skipped_in_answers(real_text: TextModel) -> None:
    ids = real_text.encode_raw("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert real_text.decode(ids) == "user\nhi"


def test_bos_goes_in_front_once() -> None:
    tokenizer = byte_level()
    start = tokenizer.token_to_id("<|start|>")
    text = open_with(tokenizer.to_str().encode(), bos_token_id=start, add_bos=True)
    plain = open_with(tokenizer.to_str().encode(), bos_token_id=start, add_bos=False)
    assert text.encode("ab").tolist() == [start, *plain.encode("ab").tolist()]
    assert text.encode("<|start|>ab").tolist() == text.encode("ab").tolist()
    assert text.encode_raw("ab").tolist() == plain.encode("ab").tolist()


def test_memoryviews_will_do(real_files: dict[str, bytes]) -> None:
    text = TextModel.from_release(
        {"tokenizer.json": memoryview(real_files["tokenizer.json"])},
        chat_template=None, eos_token_ids=(2,), bos_token_id=None, add_bos=False,
    )  # fmt: skip
    assert text.decode(text.encode("hello")) == "hello"
    assert not text.has_chat_template


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
REPLACE = {"type": "Replace", "pattern": {"String": "x"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sequence(*steps: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "decoders": list(steps)}


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "none is given"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        (sequence(REPLACE, BYTE_LEVEL), "ByteLevel is not supported"),
        (sequence({"type": "ByteFallback"}, REPLACE), "ByteFallback → Replace"),
        (sequence(REPLACE, STRIP), "Strip is not supported"),
        (sequence({"type": "Fuse"}, STRIP | {"stop": 1}), "leading spaces"),
        (sequence({"type": "Fuse"}, STRIP | {"content": "x"}), "leading spaces"),
        (sequence({"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "}), "plain string"),
    ],
)
def test_a_decoder_that_is_not_supported_is_named(decoder: dict[str, object] | None, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_with(with_decoder(decoder))


def test_nested_sequences_are_one() -> None:
    text = open_with(with_decoder(sequence(sequence(BYTE_LEVEL))))
    assert text.decode(text.encode("é x")) == "é x"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[]", b"{}", b'{"model": 3}', json.dumps({"a": 1}).encode()]
)
def test_a_broken_tokenizer_is_a_config_error(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        open_with(data)


def test_a_missing_tokenizer_and_a_missing_bos_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: expected in the release, got \['graph.onnx'\]"):
        TextModel.from_release(
            {"graph.onnx": b""}, chat_template=None, eos_token_ids=(), bos_token_id=None, add_bos=False
        )
    with pytest.raises(ConfigError, match="bos_token_id"):
        open_with(byte_level().to_str().encode(), add_bos=True)
