"""`sampling_parameters`: InvalidRequest naming the field, or options within their limits."""

import json
import math

from backend.errors import InvalidRequest
from tests.backend.parsing.requests_made import LIMITS, parse, sampling
from tests.fuzz.contract import plain

EXAMPLES = (
    b'{"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "max_tokens": 4, "min_tokens": 1}',
    json.dumps({"n": 1, "best_of": None, "stop": ["a", "b"], "logprobs": 0, "ignore_eos": True}).encode(),
    json.dumps({"repetition_penalty": "1.1", "presence_penalty": -2, "frequency_penalty": 2}).encode(),
    json.dumps({"min_p": "0." + "1" * 39, "stop_words": "x", "cache_salt": "s", "no_cache": "true"}).encode(),
    b'{"seed": ' + b"9" * 1500 + b"}",
    b'{"max_tokens": 1e400, "temperature": -0.0}',
    b'{"\\u001b[31m": 1}',
    b'{"stop": ["' + b'","' * 500 + b'"]}',
    b'{"temperature": {"a": ' * 300,
    b'{"top_p": "' + b"0" * 1500 + b'"}',
)


def target(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        made = parse(sampling(text))
    except InvalidRequest as error:
        plain(error)
        return
    chosen = made.sampling
    assert 0 <= chosen.temperature <= 100
    assert 0 < chosen.top_p <= 1
    assert 0 <= chosen.min_p <= 1
    assert 0.01 <= chosen.repetition_penalty <= 100
    assert abs(chosen.presence_penalty) <= 2
    assert abs(chosen.frequency_penalty) <= 2
    assert all(
        math.isfinite(value)
        for value in (chosen.temperature, chosen.top_p, chosen.min_p, chosen.repetition_penalty)
    )
    assert 0 <= chosen.top_k < 2**31
    assert 0 <= chosen.seed < 2**64
    assert 0 <= made.min_tokens <= made.max_tokens <= LIMITS.max_seq_len
    assert len(made.stop_words) <= LIMITS.max_stop_words
    assert all(0 < len(word.encode()) <= LIMITS.max_stop_word_bytes for word in made.stop_words)
    assert len(made.cache_salt.encode()) <= LIMITS.max_cache_salt_bytes
