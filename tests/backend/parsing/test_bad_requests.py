import json
from typing import Any

import numpy as np
import pytest

from backend.errors import InvalidRequest
from backend.io import INPUTS, PROMPTS, RESERVED, PortType
from backend.text import TextModel
from tests.backend.parsing.requests_made import (
    NO_TEMPLATE,
    TEXT,
    VOCAB,
    Inputs,
    hello,
    one,
    parse,
    sampling,
    strings,
)

F32, I32, BOOL, U64 = np.float32, np.int32, np.bool_, np.uint64
BAD_INPUTS: list[tuple[Inputs, str]] = [
    ({}, "inputs: must hold exactly one of text_input, messages, input_ids, got []"),
    (hello(input_ids=np.array([1], I32)), "inputs: must hold exactly one of"),
    ({"text_input": strings("")}, "text_input: must not be empty"),
    ({"text_input": strings(b"ab\xff")}, "text_input: must be UTF-8; the byte at 2 is not, got b'\\xff'"),
    ({"text_input": strings("x" * 2001)}, "text_input: must have at most 2000 bytes, got 2001"),
    ({"text_input": strings("x" * 64)}, "text_input: must have 1 to 63 tokens"),
    ({"text_input": strings("a", "b")}, "text_input: must have shape [1], got [2]"),
    ({"text_input": strings()}, "text_input: must have shape [1], got [0]"),
    ({"text_input": strings("a").reshape(1, 1)}, "text_input: must have shape [1], got [1, 1]"),
    ({"text_input": one(3, I32)}, "text_input: must be a tensor of TYPE_STRING, got 'int32'"),
    ({"text_input": np.array(["a"], np.object_)}, "text_input: must be bytes, got 'a'"),
    ({"messages": strings("nope")}, "messages: must be JSON"),
    ({"messages": strings('[{"role": "user"}]')}, "messages[0].content: is missing"),
    (
        {"messages": strings(json.dumps([{"role": "user", "content": "x" * 63}]))},
        "messages: must have 1 to 63 tokens",
    ),
    ({"input_ids": np.array([], I32)}, "input_ids: must have 1 to 63 tokens"),
    ({"input_ids": np.array([1, -1], I32)}, "input_ids[1]: must be in [0, 299], got -1"),
    ({"input_ids": np.array([VOCAB], I32)}, "input_ids[0]: must be in [0, 299], got 300"),
    ({"input_ids": np.array([1], np.int64)}, "input_ids: must be a tensor of TYPE_INT32, got 'int64'"),
    ({"input_ids": np.array([[1]], I32)}, "input_ids: must have shape [-1], got [1, 1]"),
    (hello(max_tokens=one(0, I32)), "max_tokens: must be an integer in [1, 2147483647], got 0"),
    (hello(max_tokens=one(-5, I32)), "max_tokens: must be an integer in [1, 2147483647], got -5"),
    (hello(max_tokens=one(5, F32)), "max_tokens: must be a tensor of TYPE_INT32, got 'float32'"),
    (hello(max_tokens=one(5, BOOL)), "max_tokens: must be a tensor of TYPE_INT32, got 'bool'"),
    (hello(min_tokens=one(17, I32)), "min_tokens: must be at most max_tokens (16), got 17"),
    (hello(temperature=one(np.nan, F32)), "temperature: must be a number in [0, 100], got nan"),
    (hello(temperature=one(np.inf, F32)), "temperature: must be a number in [0, 100], got inf"),
    (hello(temperature=one(-0.5, F32)), "temperature: must be a number in [0, 100], got -0.5"),
    (hello(temperature=one(0.5, np.float64)), "temperature: must be a tensor of TYPE_FP32, got 'float64'"),
    (hello(top_p=one(0, F32)), "top_p: must be a number in (0, 1], got 0.0"),
    (hello(top_p=one(1.5, F32)), "top_p: must be a number in (0, 1], got 1.5"),
    (hello(min_p=one(-0.1, F32)), "min_p: must be a number in [0, 1], got -0.1"),
    (hello(top_k=one(-2, I32)), "top_k: must be an integer in [-1, 2147483647], got -2"),
    (hello(repetition_penalty=one(0, F32)), "repetition_penalty: must be a number in [0.01, 100], got 0.0"),
    (hello(presence_penalty=one(3, F32)), "presence_penalty: must be a number in [-2, 2], got 3.0"),
    (hello(stop_words=strings(b"\xc3")), "stop_words[0]: must be UTF-8"),
    (hello(stop_words=strings(*["x"] * 65)), "stop_words: must hold at most 64 strings, got 65"),
    (hello(stop_words=strings("a", "x" * 257)), "stop_words[1]: must have at most 256 bytes, got 257"),
    (hello(cache_salt=strings("x" * 257)), "cache_salt: must have at most 256 bytes, got 257"),
    (hello(lora_name=strings("a")), "lora_name: is not supported; must be absent or '', got 'a'"),
    (hello(beam_width=one(2, I32)), "beam_width: is not supported; must be absent or 1, got 2"),
    (hello(image=strings("png")), "image: is not supported; must be absent or [], got ['png']"),
    (hello(other=one(1, I32)), "other: is not an input of this model"),
    (sampling(""), "sampling_parameters: must be JSON: Expecting value at character 0, got ''"),
    (sampling({"": 1}), "sampling_parameters.'': is not a sampling parameter known here"),
    (sampling("[]"), "sampling_parameters: must be a JSON object, got []"),
    (sampling("{'a': 1}"), "sampling_parameters: must be JSON: Expecting property name"),
    (sampling('{"top_k": 1, "top_k": 2}'), "sampling_parameters: must not give a key twice, got 'top_k'"),
    (sampling('{"temperature": NaN}'), "sampling_parameters: must hold finite numbers, got 'NaN'"),
    (
        sampling('{"temperature": 1e999}'),
        "sampling_parameters.temperature: must be a number in [0, 100], got inf",
    ),
    (sampling('{"seed": ' + "9" * 400 + "}"), "sampling_parameters.seed: must be an integer in"),
    (sampling('{"temperature": ' + "9" * 400 + "}"), "sampling_parameters.temperature: must be a number in"),
    (
        sampling({"temperature": True}),
        "sampling_parameters.temperature: must be a number in [0, 100], got True",
    ),
    (sampling({"max_tokens": True}), "sampling_parameters.max_tokens: must be an integer in"),
    (
        sampling({"max_tokens": 5.0}),
        "sampling_parameters.max_tokens: must be an integer in [1, 2147483647], got 5.0",
    ),
    (
        sampling({"temperature": "hot"}),
        "sampling_parameters.temperature: must be a number in [0, 100], got 'hot'",
    ),
    (
        sampling({"temperature": "nan"}),
        "sampling_parameters.temperature: must be a number in [0, 100], got 'nan'",
    ),
    (sampling({"ignore_eos": 1}), "sampling_parameters.ignore_eos: must be true or false, got 1"),
    (sampling({"stop": [1]}), "sampling_parameters.stop[0]: must be a string, got 1"),
    (sampling({"stop": {"a": 1}}), "sampling_parameters.stop: must be a string or a list of strings"),
    (sampling({"stop": "a", "stop_words": "b"}), "conflicts with another name of stop_words"),
    (sampling({"n": 2}), "sampling_parameters.n: is not supported; must be absent or 1, got 2"),
    (sampling({"n": True}), "sampling_parameters.n: is not supported; must be absent or 1, got True"),
    (
        sampling({"logprobs": 5}),
        "sampling_parameters.logprobs: must be 0 (the chosen token's) or null, got 5",
    ),
    (
        sampling({"prompt_logprobs": 1}),
        "sampling_parameters.prompt_logprobs: is not supported; must be absent or null",
    ),
    (sampling({"topk": 5}), "sampling_parameters.topk: is not a sampling parameter known here"),
    (sampling({"text_input": "x"}), "sampling_parameters.text_input: is not a sampling parameter known here"),
    (
        sampling({"sampling_parameters": "{}"}),
        "sampling_parameters.sampling_parameters: is not a sampling parameter",
    ),
    (sampling('{"cache_salt": "\\ud800"}'), "sampling_parameters: must not hold lone surrogates"),
    (sampling('{"a":' * 500 + "1" + "}" * 500), "sampling_parameters: must"),
    (sampling("x" * 2001), "sampling_parameters: must have at most 2000 bytes, got 2001"),
    (sampling('{"a\\nb": 1}'), "'sampling_parameters.a\\nb': is not a sampling parameter"),
]
BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "foo: is not a parameter of this model"),
    ({"": 1}, "'': is not a parameter of this model"),
    ({"sampling_parameters": ""}, "sampling_parameters: must be JSON: Expecting value at character 0"),
    ({"text_input": "x"}, "text_input: must be an input, not a request parameter"),
    ({"timeout": -1}, "timeout: must be an integer in [0, 9223372036854775807], got -1"),
    ({"timeout": True}, "timeout: must be an integer"),
    ({"timeout": 1.5}, "timeout: must be an integer"),
    ({"timeout": "soon"}, "timeout: must be an integer in [0, 9223372036854775807], got 'soon'"),
    (
        {"timeout": 10**6000},
        "timeout: must be an integer in [0, 9223372036854775807], got int too long to show",
    ),
    ({"max_tokens": "-3"}, "max_tokens: must be an integer in [1, 2147483647], got '-3'"),
    ({"temperature": float("nan")}, "temperature: must be a number in [0, 100], got nan"),
    ({"temperature": 10**400}, "temperature: must be a number in [0, 100]"),
    ({"stream": "yes"}, "stream: must be true or false, got 'yes'"),
    ({"stream": 1}, "stream: must be true or false, got 1"),
    ({"stop_words": 3}, "stop_words: must be a string or a list of strings, got 3"),
    ({"cache_salt": "\ud800"}, "cache_salt: must not hold lone surrogates"),
    ({"lora_name": "x"}, "lora_name: is not supported"),
    ({"beam_width": True}, "beam_width: is not supported; must be absent or 1, got True"),
    ({"seed": -1}, "seed: must be an integer in [0, 18446744073709551615], got -1"),
    ({"bad\nname": 1}, "'bad\\nname': is not a parameter"),
    ({"\ud800": 1}, "'\\ud800': is not a parameter"),
    ({"x" * 5000: 1}, "is not a parameter"),
]


def assert_refused(error: str, inputs: Inputs, parameters: dict[str, Any], *, text: TextModel = TEXT) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(inputs, parameters, text=text)
    line = str(caught.value)
    assert error in line
    assert not line.startswith(":")
    assert "\n" not in line
    assert len(line) < 500
    line.encode()


@pytest.mark.parametrize(("inputs", "error"), BAD_INPUTS)
def test_bad_inputs_get_one_line(inputs: Inputs, error: str) -> None:
    assert_refused(error, inputs, {})


@pytest.mark.parametrize(("parameters", "error"), BAD_PARAMETERS)
def test_bad_parameters_get_one_line(parameters: dict[str, Any], error: str) -> None:
    assert_refused(error, hello(), parameters)


def test_messages_need_a_template() -> None:
    messages = strings('[{"role": "user", "content": "hi"}]')
    assert_refused("messages: this model has no chat template", {"messages": messages}, {}, text=NO_TEMPLATE)


def test_every_input_of_the_table_is_known_to_the_parser() -> None:
    for port in INPUTS:
        value = {PortType.BYTES: strings("1"), PortType.BOOL: one(True, BOOL)}.get(port.type)
        tensor = one(1, port.type.numpy) if value is None else value
        inputs = {port.name: tensor} if port in PROMPTS else hello(**{port.name: tensor})
        if port in RESERVED[:3] or port.name in ("messages", "sampling_parameters", "image"):  # "1" is wrong
            with pytest.raises(InvalidRequest, match=f"^{port.name}: "):
                parse(inputs)
        else:
            assert parse(inputs).request_id == "r1"
