"""A small client of Triton's HTTP endpoint: ready, load, unload, metrics, and the one-token probe.

It uses only the standard library, so that the liveness check depends on nothing that may be missing. Every
call has a time limit.
"""

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any

from scripts.errors import TritonError
from scripts.triton_runtime import ADMIN_HEADER, TritonAddress

_NO_ROOM = ("queue is full", "max_open_requests is")
"""What a backend without room says. /generate turns every error into 400, so the status does not tell."""

_DENIED = "access denied"
"""What a backend with access control says to everybody whom it does not know."""

_STUCK = "the backend is stuck"
"""What a backend says whose own watchdog found a thread dead or hanging: no need to ask twice."""

LEFT_S = 1.0
"""How long a probe lasts when its caller has stopped waiting: a deadline before would look like an answer."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status and body of one answer."""

    status: int
    body: bytes

    @property
    def denied(self) -> bool:
        """True if it was refused for want of a credential."""
        return self.status != 200 and self.error.startswith(_DENIED)

    @property
    def error(self) -> str:
        """Triton's error text, else the start of the body."""
        try:
            decoded = json.loads(self.body)
        except ValueError:
            return self.body[:200].decode("utf-8", "replace")
        return str(decoded.get("error", "")) if isinstance(decoded, dict) else ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`alive` is the verdict; `busy`: it said that it has no room; `stuck`: that it cannot go on.

    `denied`: it did not admit who asked, so nobody knows.
    """

    alive: bool
    busy: bool
    timed_out: bool
    seconds: float
    detail: str
    stuck: bool = False
    denied: bool = False


class TritonHttp:
    """Calls one Triton. Stateless: a connection per call."""

    def __init__(
        self, address: TritonAddress, *, admin_key: str | None = None, probe_key: str | None = None
    ) -> None:
        """`admin_key` opens Triton's own doors; `probe_key` is what a probe shows to access control."""
        self._address = address
        self._admin_key = admin_key
        self._probe_key = probe_key

    def call(self, method: str, path: str, payload: object = None, *, limit_s: float = 5.0) -> HttpAnswer:
        """One request. OSError or http.client.HTTPException if there is no answer within the limit."""
        return self._call(self._address.http_port, method, path, payload, limit_s)

    def _call(self, port: int, method: str, path: str, payload: object, limit_s: float) -> HttpAnswer:
        connection = http.client.HTTPConnection(self._address.client_host, port, timeout=limit_s)
        headers = {"Content-Type": "application/json"}
        if self._admin_key is not None:
            headers[ADMIN_HEADER] = self._admin_key
        try:
            body = None if payload is None else json.dumps(payload)
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return HttpAnswer(status=response.status, body=response.read())
        finally:
            connection.close()

    def server_ready(self) -> bool:
        """True once every named model is loaded."""
        return self._is_ok("/v2/health/ready")

    def _is_ok(self, path: str) -> bool:
        try:
            return self.call("GET", path, limit_s=2.0).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def load(self, model: str, *, limit_s: float = 300.0, parameters: dict[str, Any] | None = None) -> None:
        """Load a model; TritonError carries Triton's reason."""
        payload = {"parameters": parameters} if parameters else None
        self._control(model, "load", payload, limit_s)

    def unload(self, model: str, *, limit_s: float = 30.0) -> None:
        """Begin to unload a model; running requests finish first."""
        self._control(model, "unload", None, limit_s)

    def _control(self, model: str, verb: str, payload: object, limit_s: float) -> None:
        try:
            answer = self.call("POST", f"/v2/repository/models/{model}/{verb}", payload, limit_s=limit_s)
        except (OSError, http.client.HTTPException) as error:
            raise TritonError(f"{verb} {model}: no answer: {_reason(error)}") from None
        if answer.status != 200:
            raise TritonError(f"{verb} {model}: {answer.error} ({answer.status})")

    def repository_index(self) -> dict[str, tuple[str, str]]:
        """State and reason of every model Triton knows, by name."""
        answer = self.call("POST", "/v2/repository/index", {})
        if answer.status != 200:
            raise TritonError(f"repository index: {answer.error} ({answer.status})")
        return {row["name"]: (row.get("state", ""), row.get("reason", "")) for row in json.loads(answer.body)}

    def facade_target(self, model: str) -> str | None:
        """The decoder a facade asks, from the configuration it is loaded with; None for a decoder."""
        try:
            answer = self.call("GET", f"/v2/models/{model}/config")
        except (OSError, http.client.HTTPException) as error:
            raise TritonError(f"configuration of {model}: no answer: {_reason(error)}") from None
        if answer.status != 200:
            raise TritonError(f"configuration of {model}: {answer.error} ({answer.status})")
        parameters = json.loads(answer.body).get("parameters", {})
        return parameters.get("facade_for", {}).get("string_value") or None

    def metrics(self) -> str:
        """The metrics page, or an empty text if there is none."""
        try:
            answer = self._call(self._address.metrics_port, "GET", "/metrics", None, 2.0)
        except (OSError, http.client.HTTPException):
            return ""
        return answer.body.decode("utf-8", "replace") if answer.status == 200 else ""

    def probe(self, model: str, *, limit_s: float = 2.0) -> ProbeResult:
        """Ask for one token. Only a token, or the word that there is no room now, proves a living backend."""
        started = time.monotonic()
        try:
            answer = self.ask_for_token(model, limit_s=limit_s)
        except (OSError, http.client.HTTPException) as error:
            late = isinstance(error, TimeoutError)
            detail = f"no token within {limit_s:g} s" if late else _reason(error)
            return ProbeResult(False, False, late, time.monotonic() - started, detail)
        seconds = time.monotonic() - started
        if answer.status == 200 and b"text_output" in answer.body:
            return ProbeResult(True, False, False, seconds, "one token")
        stuck = _STUCK in answer.error
        busy = not stuck and (answer.status == 503 or any(words in answer.error for words in _NO_ROOM))
        detail = f"{answer.error} ({answer.status})"
        return ProbeResult(busy, busy, False, seconds, detail, stuck=stuck, denied=answer.denied)

    def ask_for_token(self, model: str, *, limit_s: float) -> HttpAnswer:
        """The answer to the smallest request; see `call` for what it raises."""
        request = probe_request(limit_s=limit_s, key=self._probe_key)
        return self.call("POST", f"/v2/models/{model}/generate", request, limit_s=limit_s)


def probe_request(*, limit_s: float, key: str | None = None) -> dict[str, object]:
    """One token, kept out of request metrics, for a caller who waits `limit_s` and may show a key.

    Triton does not notice that such a caller has left, so the request ends by itself soon after: while a
    swap drains, requests of callers that are gone must not fill the waiting room.
    """
    timeout_us = int(1e6 * (limit_s + LEFT_S))
    request = {"text_input": "Hi", "max_tokens": 1, "triton_probe": True, "timeout": timeout_us}
    return request if key is None else {**request, "api_key": key}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
