import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.errors import InvalidRequest
from backend.io import INPUTS, MANY, OPTIONS, PROMPTS, RESERVED, PortType
from tests.backend.parsing.requests_made import (
    LIMITS,
    NOW,
    Inputs,
    one,
    parse,
    strings,
)

F32, I32, BOOL, U64 = np.float32, np.int32, np.bool_, np.uint64
NAMES = [port.name for port in INPUTS]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["1", "0.5", "true", "\ud800", "nan", "9" * 30, ""]),
    st.just(10**4200),
)
json_values = st.recursive(
    scalars.filter(lambda value: not isinstance(value, int) or abs(value) < 10**4100),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
documents = st.one_of(
    st.text(max_size=20),
    st.dictionaries(
        st.sampled_from([*NAMES, "n", "stop", "logprobs", "best_of", "detokenize", "x"]),
        json_values,
        max_size=5,
    ).map(json.dumps),
    st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "name", "type", "text"]), json_values, max_size=3
        ),
        max_size=3,
    ).map(json.dumps),
)
blobs = st.one_of(documents.map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=12))
tensors = st.one_of(
    st.lists(st.one_of(blobs, scalars), max_size=3).map(
        lambda items: np.array([*items, None], np.object_)[:-1]
    ),
    st.lists(st.integers(-5, 400), max_size=70).map(lambda items: np.array(items, np.int32)),
    st.lists(st.floats(width=32), max_size=2).map(lambda items: np.array(items, np.float32)),
    st.lists(st.booleans(), max_size=2).map(lambda items: np.array(items, np.bool_)),
    st.lists(st.integers(0, 2**64 - 1), max_size=2).map(lambda items: np.array(items, np.uint64)),
    st.sampled_from([np.zeros((1, 1), np.float32), np.float64(3) * np.ones(1), np.zeros((), np.int32)]),
)
right_tensors: dict[PortType, st.SearchStrategy[np.ndarray[Any, Any]]] = {
    PortType.BYTES: blobs.map(lambda blob: strings(blob)),
    PortType.BOOL: st.booleans().map(lambda value: one(value, BOOL)),
    PortType.INT32: st.integers(-2, 90).map(lambda value: one(value, I32)),
    PortType.UINT64: st.integers(0, 2**64 - 1).map(lambda value: one(value, U64)),
    PortType.FP32: st.floats(width=32).map(lambda value: one(value, F32)),
}


@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_nothing_but_invalid_request_comes_out(data: st.DataObject) -> None:
    inputs: Inputs = {}
    if data.draw(st.booleans()):
        inputs["text_input"] = strings("hello")
    for port in data.draw(st.lists(st.sampled_from(INPUTS), max_size=4)):
        inputs[port.name] = data.draw(st.one_of(right_tensors[port.type], tensors))
    names = st.one_of(st.sampled_from([*NAMES, "timeout", "id", "api_key", "triton_x"]), st.text(max_size=5))
    parameters = data.draw(st.dictionaries(names, scalars, max_size=3))
    try:
        made = parse(inputs, parameters)
    except InvalidRequest as error:
        line = str(error)
        assert "\n" not in line
        line.encode()
    else:
        assert 1 <= len(made.prompt) < LIMITS.max_seq_len
        assert 0 <= made.min_tokens <= made.max_tokens <= LIMITS.max_seq_len - len(made.prompt)
        assert 0 <= made.sampling.temperature <= 100
        assert 0 < made.sampling.top_p <= 1
        assert 0 <= made.sampling.seed < 2**64
        assert made.deadline is None or made.deadline > NOW
        assert all(made.stop_words)


def test_tables_do_not_overlap() -> None:
    assert len(set(NAMES)) == len(INPUTS) == len(PROMPTS) + len(OPTIONS) + len(RESERVED)
    assert {port.dims for port in INPUTS} == {(1,), MANY}
