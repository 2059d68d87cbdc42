"""Bad input gets one clear line with a status, and the server goes on."""

import json

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from scripts.triton_stream import tensor
from tests.e2e.asking import generate, infer_status, text_of
from tests.e2e.conftest import FACADE, MAX_SEQ_LEN, MODEL, Triton

BAD: list[tuple[dict[str, object], int, str]] = [
    ({"text_input": ""}, 400, "text_input: must not be empty"),
    ({"text_input": "x " * (2 * MAX_SEQ_LEN)}, 400, f"text_input: must have 1 to {MAX_SEQ_LEN - 1} tokens"),
    ({"text_input": "a", "max_tokens": -1}, 400, "max_tokens: .*-1"),
    ({"text_input": "a", "max_tokens": 0}, 400, "max_tokens: .*0"),
    ({"text_input": "a", "max_tokens": "ten"}, 500, "Unable to parse 'data'"),  # Triton's own JSON reader
    ({"text_input": "a", "max_tokens": 2, "min_tokens": 3}, 400, r"min_tokens: .*max_tokens \(2\).*3"),
    ({"text_input": "a", "temperature": -1.0}, 400, "temperature: .*-1"),
    ({"text_input": "a", "top_p": 0.0}, 400, "top_p: .*0"),
    ({"text_input": "a", "top_p": 1.5}, 400, "top_p: .*1.5"),
    ({"text_input": "a", "top_k": -2}, 400, "top_k: .*-2"),
    ({"text_input": "a", "no_such_thing": 1}, 400, "no_such_thing: is not a parameter"),
    ({"text_input": "a", "lora_name": "x"}, 400, "lora_name: is not supported"),
    ({"text_input": "a", "beam_width": 4}, 400, "beam_width: is not supported"),
    ({"text_input": "a", "messages": "[]"}, 400, "exactly one of"),
    ({"max_tokens": 4}, 400, "exactly one of"),
    ({"messages": "not json"}, 400, "messages"),
    ({"messages": "[]"}, 400, "messages"),
    ({"messages": json.dumps([{"role": "user"}])}, 400, "messages"),
    ({"messages": json.dumps([{"role": 5, "content": "x"}])}, 400, "messages"),
    ({"messages": json.dumps({"role": "user", "content": "x"})}, 400, "messages"),
    ({"input_ids": [1, 99_999_999]}, 400, r"input_ids\[1\]: .*99999999"),
    ({"input_ids": [1, -5]}, 400, r"input_ids\[1\]: .*-5"),
    ({"text_input": "a", "sampling_parameters": "{"}, 400, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": '{"temperature": NaN}'}, 400, "sampling_parameters"),
    ({"text_input": "a", "timeout": -1}, 400, "timeout: .*-1"),
]


@pytest.mark.parametrize(("fields", "status", "text"), BAD, ids=[str(row[2])[:30] for row in BAD])
def test_bad_input_is_said_in_one_line(
    triton: Triton, fields: dict[str, object], status: int, text: str
) -> None:
    import re

    got, body = generate(triton, **fields)
    assert got == status, body
    assert re.search(text, body["error"]), body
    assert "\n" not in body["error"].strip()
    assert "Traceback" not in body["error"]
    assert len(body["error"]) < 600


def test_it_still_serves_after_all_of_it(triton: Triton) -> None:
    assert text_of(triton, text_input="The capital of France is", max_tokens=4)


@pytest.mark.parametrize(
    ("name", "value", "type_name"),
    [
        ("temperature", np.array([np.nan], dtype=np.float32), "FP32"),
        ("temperature", np.array([np.inf], dtype=np.float32), "FP32"),
        ("top_p", np.array([np.nan], dtype=np.float32), "FP32"),
        ("repetition_penalty", np.array([0.0], dtype=np.float32), "FP32"),
    ],
)
def test_numbers_that_are_none_are_refused(
    triton: Triton, name: str, value: "np.ndarray", type_name: str
) -> None:
    wrong = tritonclient.grpc.InferInput(name, list(value.shape), type_name)
    wrong.set_data_from_numpy(value)
    with (
        tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client,
        pytest.raises(tritonclient.grpc.InferenceServerException, match=f"{name}: "),
    ):
        client.infer(FACADE, [tensor("text_input", "a"), wrong])


def test_a_wrong_dtype_is_refused(triton: Triton) -> None:
    wrong = tritonclient.grpc.InferInput("max_tokens", [1], "FP32")
    wrong.set_data_from_numpy(np.array([4.0], dtype=np.float32))
    with (
        tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client,
        pytest.raises(tritonclient.grpc.InferenceServerException, match="max_tokens"),
    ):
        client.infer(FACADE, [tensor("text_input", "a"), wrong])


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"caf\xe9", b"\xed\xa0\x80", b"ok \xf0\x9f"])
def test_invalid_utf8_is_refused(triton: Triton, raw: bytes) -> None:
    with (
        tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client,
        pytest.raises(tritonclient.grpc.InferenceServerException, match=r"text_input: .*UTF-8"),
    ):
        client.infer(FACADE, [tensor("text_input", raw)])


def test_two_prompts_in_one_tensor_are_refused(triton: Triton) -> None:
    with (
        tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client,
        pytest.raises(tritonclient.grpc.InferenceServerException, match="text_input"),
    ):
        client.infer(FACADE, [tensor("text_input", ["a", "b"])])


@pytest.mark.parametrize("parameters", [{"surprise": "x"}, {"surprise": True}, {"max_tokens": "many"}])
def test_unknown_request_parameters_are_refused(triton: Triton, parameters: dict[str, object]) -> None:
    with (
        tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client,
        pytest.raises(tritonclient.grpc.InferenceServerException, match=next(iter(parameters))),
    ):
        client.infer(FACADE, [tensor("text_input", "a")], parameters=parameters)


def test_an_unknown_model_is_not_found(triton: Triton) -> None:
    assert generate(triton, model="nobody", text_input="a")[0] in (400, 404)
    assert text_of(triton, text_input="a", max_tokens=1) is not None
    assert MODEL in triton.http.repository_index()


def test_the_facade_keeps_statuses(triton: Triton) -> None:
    assert infer_status(triton, {"text_input": "a", "max_tokens": -1}) == "StatusCode.INVALID_ARGUMENT"
    assert infer_status(triton, {"text_input": b"\xff"}) == "StatusCode.INVALID_ARGUMENT"
