"""Ways to ask the server, as clients do."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import tritonclient.grpc

from scripts.streamed_answer import StreamedAnswer
from scripts.triton_stream import stream_answer, tensor
from tests.e2e.conftest import FACADE, MODEL, Triton


def generate(triton: Triton, *, model: str = MODEL, **fields: object) -> tuple[int, dict[str, Any]]:
    """POST /generate: status and decoded body."""
    answer = triton.http.call("POST", f"/v2/models/{model}/generate", fields, limit_s=60)
    return answer.status, json.loads(answer.body)


def text_of(triton: Triton, **fields: object) -> str:
    """The text of a /generate that must work."""
    status, body = generate(triton, **fields)
    assert status == 200, body
    return str(body["text_output"])


def events(triton: Triton, *, model: str = MODEL, **fields: object) -> Iterator[dict[str, Any]]:
    """The events of /generate_stream."""
    connection = HTTPConnection("127.0.0.1", triton.address.http_port, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/generate_stream", body=json.dumps(fields))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


def stream(triton: Triton, *, model: str = MODEL, **fields: object) -> StreamedAnswer:
    """One gRPC stream, read to the end."""
    return stream_answer(triton.grpc_url, model, {"stream": True, **fields}, limit_s=60)


def all_at_once(triton: Triton, requests: list[dict[str, object]]) -> list[StreamedAnswer]:
    """Streams that start together; answers in the order of `requests`."""
    barrier = threading.Barrier(len(requests))

    def ask(fields: dict[str, object]) -> StreamedAnswer:
        barrier.wait(timeout=10)
        return stream(triton, **fields)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def infer_status(triton: Triton, fields: dict[str, object]) -> str:
    """The status of an `infer` through the facade that must fail."""
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        try:
            client.infer(FACADE, [tensor(name, value) for name, value in fields.items()], client_timeout=30)
        except tritonclient.grpc.InferenceServerException as error:
            return str(error.status())
    raise AssertionError("it was answered")
