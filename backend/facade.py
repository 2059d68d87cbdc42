"""A model that is not decoupled, so that plain `infer` calls work: asks a decoder, joins, answers once.

Triton's HTTP `infer` refuses decoupled models. The facade takes the same inputs, forwards them with
`stream` off together with the caller's parameters (among them the credential, never an identity), and sends
the decoder's one answer back. Sending through a response sender and returning from `execute` at once lets
one instance hold many requests open; an `async` execute of a model that is not decoupled would hold one.

Threads: `start` and `close` on Triton's thread; each open request on a thread that only waits; one watcher.
"""

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from backend.errors import BackendError, DeadlineExceeded, EngineFailed, Overloaded
from backend.io import OUTPUTS
from backend.settings import FacadeSettings

log = logging.getLogger(__name__)

CLOSE_S: Final = 30.0
ASKED_BY_FACADE: Final = "triton_asked_by_facade"
"""Parameter of a facade's question. Triton refuses such names from clients: only a facade can send it."""

_ALL_OUTPUTS: Final = [port.name for port in OUTPUTS]


class Statuses(Protocol):
    """Our errors as the server's."""

    def error(self, error: Exception) -> Any:
        """The server's error object."""
        ...

    def restored(self, error: Any) -> Any:
        """An error of the decoder with the status that was lost on the way here."""
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
    def answer_timeout_s(self) -> float:
        """How long the decoder may take for one answer."""
        return self._settings.answer_timeout_s

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
            parameters={key: value for key, value in parameters.items() if _forwarded(key)}
            | {ASKED_BY_FACADE: True},
        )
        answers = []
        for response in question.exec(
            decoupled=True
        ):  # to its end: a stub with half-read answers cannot exit
            if response.has_error():
                answers.append(self._pb.InferenceResponse(error=self._statuses.restored(response.error())))
            elif response.output_tensors():
                answers.append(self._pb.InferenceResponse(output_tensors=response.output_tensors()))
        if not answers:
            raise EngineFailed(f"{self._settings.facade_for}: ended without an answer")
        return answers[0]


def _forwarded(name: str) -> bool:
    """`stream` is decided here; names that start with triton_ belong to the server."""
    return name != "stream" and not name.startswith("triton_")


class FacadeService:
    """Runs a facade: one waiting thread per open request, no queue behind them, and an end to every wait.

    A decoder whose process dies leaves its callers without an answer, for ever; a watcher then refuses them
    after `answer_timeout_s` and gives their places to others. Whoever takes a request out of `_open`
    answers it.
    """

    def __init__(self, facade: Facade, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._facade = facade
        self._clock = clock
        self._open: dict[int, _OpenRequest] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._closing = False
        threading.Thread(target=self._watch, name="facade-watch", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Always: whether the decoder is, shows when it is asked."""
        return True

    def start(self, request: Any) -> None:
        """Answer `request` on a thread of its own, or refuse it when `max_open_requests` are open."""
        opened = _OpenRequest(
            request.get_response_sender().send, self._clock() + self._facade.answer_timeout_s
        )
        number = next(self._numbers)
        with self._changed:
            limit = self._facade.max_open_requests
            admitted = len(self._open) < limit
            if admitted:
                self._open[number] = opened
                self._changed.notify_all()
        if admitted:
            threading.Thread(target=self._serve, args=(request, number), daemon=True).start()
        else:
            error = Overloaded(f"{limit} requests are open, max_open_requests is {limit}")
            opened.answer(self._facade.refuse(error), flags=self._facade.final_flag)

    def close(self) -> None:
        """Wait for open requests; those of a decoder that never answers are left after CLOSE_S."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._open, timeout=CLOSE_S)

    def _serve(self, request: Any, number: int) -> None:
        self._answer(number, self._facade.answer(request))

    def _answer(self, number: int, response: Any) -> None:
        with self._changed:
            opened = self._open.pop(number, None)
        if opened is not None:
            opened.answer(response, flags=self._facade.final_flag)
        with self._changed:
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                now = self._clock()
                overdue = [number for number, opened in self._open.items() if opened.deadline <= now]
                if not overdue:
                    if self._closing and not self._open:
                        return
                    due = min((opened.deadline for opened in self._open.values()), default=None)
                    self._changed.wait(None if due is None else due - now)
            for number in overdue:
                limit = self._facade.answer_timeout_s
                self._answer(number, self._facade.refuse(DeadlineExceeded(f"no answer within {limit:g} s")))


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    send: Callable[..., None]
    deadline: float

    def answer(self, response: Any, *, flags: Any) -> None:
        try:
            self.send(response, flags=flags)
        except Exception as error:  # the server's own error type: the caller is gone
            log.warning("a response could not be sent: %s", error)
