"""A model that is not decoupled, so that plain `infer` calls work: asks a decoder, joins, answers once.

Triton's HTTP `infer` refuses decoupled models. The facade takes the same inputs, forwards them with
`stream` off together with the caller's parameters (among them the credential, never an identity), and sends the
decoder's one answer back. Sending through a response sender and returning from `execute` at once lets one
instance hold many requests open; an `async` execute of a model that is not decoupled would hold one.

Threads: `start` on Triton's thread; each open request on a thread of the pool, which only waits.
"""

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np

from backend.errors import BackendError, EngineFailed, Overloaded
from backend.io import OUTPUTS
from backend.settings import FacadeSettings

log = logging.getLogger(__name__)

_ALL_OUTPUTS: Final = [port.name for port in OUTPUTS]


class Statuses(Protocol):
    """Our errors as the server's."""

    def error(self, error: Exception) -> Any:
        """The server's error object."""
        ...


class Facade:
    """Asks the decoder for one request. `pb_utils` is handed in: one module alone imports it."""

    def __init__(self, pb_utils: Any, settings: FacadeSettings, *, statuses: Statuses) -> None:
        self._pb = pb_utils
        self._settings = settings
        self._statuses = statuses

    @property
    def max_open_requests(self) -> int:
        """How many requests may be open at once."""
        return self._settings.max_open_requests

    @property
    def final_flag(self) -> Any:
        """Marks the only response as the last."""
        return self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def answer(self, request: Any) -> Any:
        """The one response for `request`: the decoder's, or an error."""
        try:
            return self._ask(request)
        except BackendError as error:
            return self.refuse(error)
        except Exception as error:  # pb_utils raises its own type: unknown model, model not ready
            return self.refuse(EngineFailed(f"{self._settings.facade_for}: {error}"))

    def refuse(self, error: BackendError) -> Any:
        """A response that carries `error`."""
        return self._pb.InferenceResponse(error=self._statuses.error(error))

    def _ask(self, request: Any) -> Any:
        parameters = json.loads(request.parameters() or "{}")
        inputs = [tensor for tensor in request.inputs() if tensor.name() != "stream"]
        inputs.append(self._pb.Tensor("stream", np.array([False])))
        question = self._pb.InferenceRequest(
            model_name=self._settings.facade_for,
            request_id=request.request_id(),
            requested_output_names=list(request.requested_output_names()) or _ALL_OUTPUTS,
            inputs=inputs,
            timeout=request.timeout(),
            parameters={key: value for key, value in parameters.items() if _forwarded(key)},
        )
        answers = []
        for response in question.exec(decoupled=True):  # to its end: a stub with half-read answers cannot exit
            if response.has_error():
                answers.append(self._pb.InferenceResponse(error=response.error()))
            elif response.output_tensors():
                answers.append(self._pb.InferenceResponse(output_tensors=response.output_tensors()))
        if not answers:
            raise EngineFailed(f"{self._settings.facade_for}: ended without an answer")
        return answers[0]


def _forwarded(name: str) -> bool:
    """`stream` is decided here; names that start with triton_ belong to the server."""
    return name != "stream" and not name.startswith("triton_")


class FacadeService:
    """Runs a facade: one waiting thread per open request, and no queue behind them."""

    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self._pool = ThreadPoolExecutor(facade.max_open_requests, thread_name_prefix="facade")
        self._free = threading.BoundedSemaphore(facade.max_open_requests)

    @property
    def ready(self) -> bool:
        """Always: whether the decoder is, shows when it is asked."""
        return True

    def start(self, request: Any) -> None:
        """Answer `request` on a thread of the pool, or refuse it when all of them wait."""
        send: Callable[..., None] = request.get_response_sender().send
        if self._free.acquire(blocking=False):
            self._pool.submit(self._serve, request, send)
        else:
            limit = self._facade.max_open_requests
            error = Overloaded(f"{limit} requests are open, max_open_requests is {limit}")
            self._send(self._facade.refuse(error), send)

    def close(self) -> None:
        """Wait for open requests."""
        self._pool.shutdown(wait=True)

    def _serve(self, request: Any, send: Callable[..., None]) -> None:
        try:
            self._send(self._facade.answer(request), send)
        finally:
            self._free.release()

    def _send(self, response: Any, send: Callable[..., None]) -> None:
        try:
            send(response, flags=self._facade.final_flag)
        except Exception as error:  # the server's own error type: the caller is gone
            log.warning("a response could not be sent: %s", error)
