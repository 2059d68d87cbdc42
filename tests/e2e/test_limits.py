"""Leaving early, being late, and a full queue: lanes come back, the last response always comes."""

import itertools
import json
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import tritonclient.grpc

from scripts.errors import TritonError
from scripts.triton_stream import tensor
from tests.e2e.asking import events, generate, infer_status, stream, text_of
from tests.e2e.conftest import LANES, MODEL, QUEUE, Triton
from tests.waiting import wait_until

ENDLESS: dict[str, object] = {
    "text_input": "Once upon a time",
    "max_tokens": 1900,
    "ignore_eos": True,
    "no_cache": True,
}


def running(triton: Triton) -> float:
    return triton.metric("requests_running", model=MODEL)


def waiting(triton: Triton) -> float:
    return triton.metric("requests_waiting", model=MODEL)


def ended(triton: Triton, reason: str) -> float:
    return triton.metric("requests_total", model=MODEL, reason=reason)


def open_http_stream(triton: Triton) -> socket.socket:
    """A /generate_stream that has begun to answer; closing the socket leaves it."""
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", triton.address.http_port), timeout=30)
    head = (
        f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    received = b""
    while b"data: " not in received:
        part = connection.recv(4096)
        assert part, received
        received += part
    return connection


def test_a_client_that_hangs_up_frees_its_lane(triton: Triton) -> None:
    before = ended(triton, "cancelled")
    open_http_stream(triton).close()
    wait_until(lambda: ended(triton, "cancelled") == before + 1)
    wait_until(lambda: running(triton) == 0)


def test_stopping_a_grpc_stream_frees_its_lane(triton: Triton) -> None:
    before = ended(triton, "cancelled")
    first: Future[None] = Future()

    def seen(result: object, error: Exception | None) -> None:
        if error is None and not first.done():
            first.set_result(None)

    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        client.start_stream(callback=seen)
        tensors = [tensor(name, value) for name, value in {**ENDLESS, "stream": True}.items()]
        client.async_stream_infer(MODEL, tensors)
        first.result(timeout=30)
        client.stop_stream(cancel_requests=True)
    wait_until(lambda: ended(triton, "cancelled") == before + 1)
    wait_until(lambda: running(triton) == 0)


def test_a_deadline_ends_an_answer_with_what_there_is(triton: Triton) -> None:
    started = time.monotonic()
    status, body = generate(triton, **ENDLESS, timeout=700_000)
    assert time.monotonic() - started < 3
    assert status == 200, body
    assert body["finish_reason"] == "deadline"
    assert 0 < body["num_output_tokens"] < 1900


def test_a_deadline_before_the_first_token_is_an_answer_without_tokens(triton: Triton) -> None:
    fields = ENDLESS | {"text_input": "word " * 1500, "timeout": 20_000}
    status, body = generate(triton, **fields)
    assert status == 200, body
    assert (body["finish_reason"], body["text_output"], body["num_output_tokens"]) == ("deadline", "", 0)
    last = list(events(triton, **fields, stream=True))[-1]
    assert (last["finish_reason"], last["text_output"], last["num_output_tokens"]) == ("deadline", "", 0)


@pytest.mark.timeout(120)
def test_a_full_queue_says_so_and_drains(triton: Triton) -> None:
    room = LANES + QUEUE
    with ThreadPoolExecutor(room) as pool:
        connections = [open_http_stream(triton) for _ in range(LANES)]
        queued = [pool.submit(generate, triton, text_input="Hi", max_tokens=1) for _ in range(QUEUE)]
        try:
            wait_until(lambda: (running(triton), waiting(triton)) == (LANES, QUEUE))
            status, body = generate(triton, text_input="Hi", max_tokens=1)
            with pytest.raises(TritonError, match="max_queue_size is 8"):
                stream(triton, text_input="Hi", max_tokens=1)
            probed = triton.http.probe(MODEL)
            through_facade = infer_status(triton, {"text_input": "Hi", "max_tokens": 1})
        finally:
            for connection in connections:
                connection.close()
        assert status == 400, body
        assert body["error"] == f"queue is full: {QUEUE} requests wait, max_queue_size is {QUEUE}"
        assert (probed.alive, probed.busy) == (True, True)
        assert through_facade == "StatusCode.UNAVAILABLE"
        assert {future.result(timeout=60)[0] for future in queued} == {200}
    wait_until(lambda: (running(triton), waiting(triton)) == (0, 0))


def test_a_long_prompt_does_not_stall_a_running_stream(triton: Triton) -> None:
    """A prompt of 1,500 tokens arrives while a stream runs: its gaps stay near what one chunk takes."""
    with ThreadPoolExecutor(2) as pool:
        runs = pool.submit(stream, triton, **ENDLESS | {"max_tokens": 160})
        wait_until(lambda: running(triton) == 1)
        comes = pool.submit(stream, triton, text_input="lamp " * 1500, max_tokens=1, no_cache=True)
        arrivals = runs.result(timeout=60).arrivals
        long_prompt = comes.result(timeout=60)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    chunk_s = long_prompt.ttft_s / (1500 / 128)
    assert max(gaps) < 4 * chunk_s, (max(gaps), chunk_s)
    assert max(gaps) < long_prompt.ttft_s / 2


def test_it_serves_as_before(triton: Triton) -> None:
    assert text_of(triton, text_input="The capital of France is", max_tokens=4)
