"""A server that answers like a Triton with TensorCache in it: ready, one token with its release, metrics."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from backend.errors import AccessDenied


class StandInServer(ThreadingHTTPServer):
    """Serves `release` of the model "small"; before each answer `on_ask` may change that, as a swap would."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.release = ""
        self.loaded = True
        self.error = ""
        self.admits: str | None = None
        """The one credential that is let in; None: there is no access control."""
        self.swap = "side_by_side"
        self.refusals: dict[str, int] = {}
        self.on_ask: Callable[[], None] = lambda: None
        self.asked: list[dict[str, object]] = []

    @property
    def words(self) -> list[str]:
        """The arguments that lead a verb here."""
        port = str(self.server_address[1])
        return ["--url", f"127.0.0.1:{port}", "--metrics-port", port]

    def answer(self, path: str, body: bytes) -> tuple[int, str]:
        if path == "/metrics":
            lines = [
                f'tensorcache_swap_refusals_total{{model="small",reason="{reason}",version="1"}} {count}'
                for reason, count in self.refusals.items()
            ]
            return 200, "\n".join(
                [*lines, 'tensorcache_swap_refusals_total{model="other",reason="digest"} 7']
            )
        if path.endswith("/ready"):
            return (200, "") if self.loaded else (400, "")
        if path.endswith("/config"):
            return 200, json.dumps({"parameters": {"swap": {"string_value": self.swap}}})
        self.asked.append(json.loads(body))
        self.on_ask()
        if self.admits is not None and self.asked[-1].get("api_key") != self.admits:
            return 400, json.dumps({"error": str(AccessDenied("unknown"))})
        if self.error:
            return 400, json.dumps({"error": self.error})
        return 200, json.dumps({"text_output": "x", "release": self.release})


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, StandInServer)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, text = server.answer(self.path, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET  # noqa: N815  (the name that http.server looks for)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


@contextmanager
def standin_server() -> Iterator[StandInServer]:
    """One on a port of its own."""
    with StandInServer() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
