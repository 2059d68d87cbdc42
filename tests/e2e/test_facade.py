"""What the facade adds to asking a decoder: parameters, outputs, callers that leave, a decoder that dies."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest
import tritonclient.grpc

from scripts.triton_stream import tensor
from tests.e2e.asking import text_of
from tests.e2e.conftest import FACADE, MODEL, Triton
from tests.waiting import wait_until

PROMPT = "The capital of France is"
ENDLESS: dict[str, object] = {"text_input": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}


def infer(triton: Triton, body: dict[str, object]) -> tuple[int, dict[str, Any]]:
    """POST /infer to the facade: status and decoded body."""
    answer = triton.http.call("POST", f"/v2/models/{FACADE}/infer", body, limit_s=60)
    return answer.status, json.loads(answer.body)


def prompt_of(**more: object) -> dict[str, object]:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [8]},
    ]
    return {"inputs": inputs, **more}


def infer_endless(triton: Triton) -> str:
    """The error of an `infer` that does not end by itself."""
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        try:
            client.infer(FACADE, [tensor(*item) for item in ENDLESS.items()], client_timeout=60)
        except tritonclient.grpc.InferenceServerException as error:
            return f"{error.status()}: {error.message()}"
    return "answered"


def running(triton: Triton) -> float:
    return triton.metric("requests_running", model=MODEL)


def test_a_float_among_the_parameters_reaches_the_decoder(triton: Triton) -> None:
    status, body = infer(triton, prompt_of(parameters={"temperature": 0.7, "seed": 11}))
    assert status == 200, body
    (text,) = [output["data"][0] for output in body["outputs"] if output["name"] == "text_output"]
    assert text == text_of(triton, text_input=PROMPT, max_tokens=8, temperature=0.7, seed=11)
    status, body = infer(triton, prompt_of(parameters={"temperature": -0.5}))
    assert status == 400
    assert body["error"].startswith("temperature: ")


def test_an_output_that_was_not_asked_of_the_decoder_is_empty(triton: Triton) -> None:
    status, body = infer(triton, prompt_of(outputs=[{"name": "logprobs"}]))
    assert status == 200, body
    assert [(output["name"], output["shape"]) for output in body["outputs"]] == [("logprobs", [0])]


def test_a_cancelled_infer_frees_its_lane(triton: Triton) -> None:
    wait_until(lambda: running(triton) == 0)
    before = triton.metric("requests_total", model=MODEL, reason="cancelled")
    done = threading.Event()
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        call = client.async_infer(
            FACADE, [tensor(*item) for item in ENDLESS.items()], lambda result, error: done.set()
        )
        wait_until(lambda: running(triton) == 1)
        call.cancel()
        assert done.wait(10)
    ended = before + 1
    wait_until(lambda: triton.metric("requests_total", model=MODEL, reason="cancelled") == ended, limit_s=2)
    wait_until(lambda: running(triton) == 0)


def test_a_client_cannot_pass_for_a_facade(triton: Triton) -> None:
    connection = HTTPConnection("127.0.0.1", triton.address.http_port, timeout=30)
    fields = {"text_input": PROMPT, "max_tokens": 2, "triton_call": "0" * 32, "triton_cancel_call": "0" * 32}
    connection.request("POST", f"/v2/models/{FACADE}/generate", body=json.dumps(fields))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["text_output"] == text_of(triton, text_input=PROMPT, max_tokens=2)


@pytest.mark.timeout(150)
def test_callers_of_a_killed_decoder_are_told(triton: Triton) -> None:
    wait_until(lambda: running(triton) == 0)
    with ThreadPoolExecutor(2) as pool:
        open_calls = [pool.submit(infer_endless, triton) for _ in range(2)]
        wait_until(lambda: running(triton) == 2)
        (pid,) = [stub.pid for stub in triton.stubs() if stub.model == MODEL]
        os.kill(pid, signal.SIGKILL)
        told = [call.result(timeout=10) for call in open_calls]
    assert told == [f"StatusCode.UNAVAILABLE: {MODEL}: its process died"] * 2
    triton.command.wait_for("Triton is serving again", limit_s=90)
    assert infer(triton, prompt_of())[0] == 200
