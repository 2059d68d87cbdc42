"""Callers that do not read: their answers are computed and kept for them, and no lane waits for them."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from scripts.triton_stream import tensor
from tests.e2e.asking import text_of
from tests.e2e.conftest import LANES, MODEL, Triton
from tests.waiting import wait_until

CALLERS, TOKENS = 2 * LANES, 48
KEPT_NBYTES = 64 << 10
"""What the stub may keep of a token that nobody reads: some hundred times what a response of it takes."""

ASKED: dict[str, object] = {
    "text_input": "Once upon a time",
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "no_cache": True,
    "stream": True,
}
_NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
"""Room for a few responses on their way: what a server can say before it is read."""


class GrpcCaller:
    """Hears the first response when it is told to read, and not before."""

    def __init__(self, triton: Triton) -> None:
        self._read = threading.Event()
        self._final = threading.Event()
        self.tokens = 0
        self.error: Exception | None = None
        self._client = tritonclient.grpc.InferenceServerClient(triton.grpc_url, channel_args=_NARROW)
        self._client.start_stream(callback=self._take)
        tensors = [tensor(name, value) for name, value in ASKED.items()]
        self._client.async_stream_infer(MODEL, tensors, enable_empty_final_response=True)

    def _take(self, result: Any, error: Exception | None) -> None:
        self._read.wait()
        if error is not None:
            self.error = error
            self._final.set()
            return
        ids = result.as_numpy("output_ids")
        self.tokens += 0 if ids is None else len(ids.reshape(-1))
        if result.get_response().parameters["triton_final_response"].bool_param:
            self._final.set()

    def read(self) -> int:
        """Read to the end; how many tokens there were."""
        self._read.set()
        assert self._final.wait(30), "no last response"
        assert self.error is None, self.error
        return self.tokens

    def close(self) -> None:
        self._read.set()
        self._client.stop_stream(cancel_requests=not self._final.is_set())
        self._client.close()


class HttpCaller:
    """A /generate_stream over a socket with next to no room."""

    def __init__(self, triton: Triton) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self._socket.settimeout(30)
        self._socket.connect(("127.0.0.1", triton.address.http_port))
        body = json.dumps(ASKED).encode()
        path = f"/v2/models/{MODEL}/generate_stream"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)

    def read(self) -> int:
        """Read to the end; how many tokens there were."""
        received = b""
        while b'"finish_reason":"length"' not in received:
            part = self._socket.recv(65536)
            assert part, received
            received += part
        events = [line[6:] for line in received.splitlines() if line.startswith(b"data: ")]
        return int(json.loads(events[-1])["num_output_tokens"])

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def callers(triton: Triton, kind: type[GrpcCaller] | type[HttpCaller]) -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(CALLERS):
            made.append(kind(triton))
            stack.callback(made[-1].close)
        yield made


def resident(triton: Triton) -> int:
    """Bytes that the stubs hold."""
    pages = (int(Path(f"/proc/{stub.pid}/statm").read_text().split()[1]) for stub in triton.stubs())
    return 4096 * sum(pages)


def complete(triton: Triton) -> float:
    return triton.metric("requests_total", model=MODEL, reason="length")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [GrpcCaller, HttpCaller], ids=["grpc", "http"])
def test_those_who_do_not_read_hold_no_lane(
    triton: Triton, kind: type[GrpcCaller] | type[HttpCaller]
) -> None:
    before, held = complete(triton), resident(triton)
    with callers(triton, kind) as slow:
        assert text_of(triton, text_input="The capital of France is", max_tokens=4)
        wait_until(lambda: complete(triton) == before + CALLERS + 1)
        wait_until(lambda: triton.metric("requests_running", model=MODEL) == 0)
        assert text_of(triton, text_input="The capital of France is", max_tokens=4)
        assert resident(triton) - held < CALLERS * TOKENS * KEPT_NBYTES
        assert [caller.read() for caller in slow] == [TOKENS] * CALLERS, "all of it was kept for them"
