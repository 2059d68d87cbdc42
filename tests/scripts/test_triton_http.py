"""The small HTTP client against a server that answers what a test says."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from backend.errors import BackendStuck
from scripts.errors import TritonError
from scripts.triton_http import TritonHttp, probe_request
from scripts.triton_runtime import TritonAddress
from tests.free_ports import free_ports


class Answering(ThreadingHTTPServer):
    """`status` and `body` are the answer to everything; a silent one holds its answers until it is closed."""

    daemon_threads = True
    status = 200
    body = b"{}"
    silent = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, str | None]] = []
        self.closed = threading.Event()

    def client(self, *, admin_key: str | None = None) -> TritonHttp:
        port = int(self.server_address[1])
        return TritonHttp(TritonAddress(http_port=port, metrics_port=port), admin_key=admin_key)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Answering)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.requests.append((self.command, self.path, self.headers.get("admin-key")))
        if server.silent:
            server.closed.wait(10)
        self.send_response(server.status)
        self.end_headers()
        self.wfile.write(server.body)

    do_POST = do_GET  # noqa: N815  (the name that http.server looks for)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Answering]:
    with Answering() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.closed.set()
        made.shutdown()
        thread.join(5)


def test_a_token_is_life(server: Answering) -> None:
    server.body = json.dumps({"text_output": "x"}).encode()
    result = server.client().probe("m")
    assert (result.alive, result.busy, result.timed_out) == (True, False, False)
    assert server.requests == [("POST", "/v2/models/m/generate", None)]


@pytest.mark.parametrize(
    ("status", "error", "alive"),
    [
        (503, "anything", True),
        (400, "queue is full: 8 requests wait, max_queue_size is 8", True),
        (400, "Stub process 'm_0' is not healthy.", False),
        (500, "engine failed", False),
        (404, "unknown model", False),
    ],
)
def test_no_room_is_life_and_other_errors_are_not(
    server: Answering, status: int, error: str, alive: bool
) -> None:
    server.status, server.body = status, json.dumps({"error": error}).encode()
    result = server.client().probe("m")
    assert (result.alive, result.busy) == (alive, alive)
    assert error in result.detail


@pytest.mark.parametrize("status", [400, 503])
def test_a_backend_that_says_it_is_stuck_is_not_busy(server: Answering, status: int) -> None:
    said = str(BackendStuck("step-loop hangs (limit 4 s), silent for 4.2 s"))
    server.status, server.body = status, json.dumps({"error": said}).encode()
    result = server.client().probe("m")
    assert (result.alive, result.busy, result.stuck) == (False, False, True)
    assert said in result.detail


def test_silence_is_told_from_refusal(server: Answering) -> None:
    server.silent = True
    silent = server.client().probe("m", limit_s=0.1)
    assert (silent.alive, silent.timed_out, silent.detail) == (False, True, "no token within 0.1 s")
    (port,) = free_ports(1)
    nobody = TritonHttp(TritonAddress(http_port=port)).probe("m", limit_s=1)
    assert (nobody.alive, nobody.timed_out) == (False, False)


def test_control_sends_the_key_and_reports_the_reason(server: Answering) -> None:
    server.client(admin_key="sesame").load("m")
    assert server.requests == [("POST", "/v2/repository/models/m/load", "sesame")]
    server.status, server.body = 400, b'{"error": "signature: expected a, found b"}'
    with pytest.raises(TritonError, match=r"load m: signature: expected a, found b \(400\)"):
        server.client().load("m")


def test_readiness_of_nobody_is_false() -> None:
    (port,) = free_ports(1)
    nobody = TritonHttp(TritonAddress(http_port=port, metrics_port=port))
    assert not nobody.server_ready()
    assert nobody.metrics() == ""
    with pytest.raises(TritonError, match="no answer"):
        nobody.unload("m")


def test_repository_index_by_name(server: Answering) -> None:
    refused = {"name": "b", "state": "UNAVAILABLE", "reason": "why"}
    server.body = json.dumps([{"name": "a", "state": "READY"}, refused, {"name": "c"}]).encode()
    index = server.client().repository_index()
    assert index == {"a": ("READY", ""), "b": ("UNAVAILABLE", "why"), "c": ("", "")}


def test_a_body_that_is_no_json_is_still_shown(server: Answering) -> None:
    server.status, server.body = 500, b"<html>oops"
    assert "<html>oops" in server.client().probe("m").detail


def test_a_probe_ends_soon_after_its_caller_gave_up_and_not_before() -> None:
    """Before, its deadline would bring an answer, and that would look like a token."""
    timeout_us = probe_request(limit_s=2.0)["timeout"]
    assert isinstance(timeout_us, int)
    assert 2e6 < timeout_us <= 4e6
