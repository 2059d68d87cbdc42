"""Tells a running model an admin's command: a request with the parameters `admin` and `api_key`."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.errors import RejectedError, TritonError
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import TritonAddress

_REASON = 200


@dataclass(frozen=True, slots=True)
class Desk:
    """One model on one server. Neither a repr nor an error shows the credential."""

    address: TritonAddress
    model: str
    limit_s: float

    @property
    def url(self) -> str:
        """Where it is, for a line of output."""
        return f"{self.address.client_host}:{self.address.http_port}"

    def tell(
        self, command: Mapping[str, str], *, credential: str, prompt: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The answer. RejectedError if it says no, TritonError if there is none."""
        request = {**(prompt or {}), "admin": json.dumps(command), "api_key": credential}
        path = f"/v2/models/{self.model}/generate"
        try:
            answer = TritonHttp(self.address).call("POST", path, request, limit_s=self.limit_s)
        except (OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
            raise TritonError(f"no answer: {problem}: name a server that runs with --url") from None
        if answer.status != 200:
            hint = ": it takes a credential with the verb admin for this model" if answer.denied else ""
            raise RejectedError(f"{_line(answer.error) or f'status {answer.status}'}{hint}")
        try:
            said = json.loads(json.loads(answer.body)["text_output"])
        except (ValueError, KeyError, TypeError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise TritonError("the answer is none of a TensorCache model")
        return said


def _line(text: str) -> str:
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= _REASON else f"{shown[:_REASON]}…"
