"""A model that is not decoupled, so that plain `infer` calls work: asks a decoder, joins, answers once.

Triton's HTTP `infer` refuses decoupled models. The facade takes the same inputs, forwards them with
`stream` off together with the caller's parameters (among them the credential, never an identity), and sends
the decoder's one answer back, with every output there is unless the caller named some. Sending through a
response sender and returning from `execute` at once lets one instance hold many requests open; an `async`
execute of a model that is not decoupled would hold one.

Names that start with triton_ are the server's and ours; gRPC clients cannot send them, HTTP clients can.
They are never forwarded: what the decoder reads of `calls` in a facade's question, the facade wrote.

Threads: one per open request, which only waits (`answer`); `cancel` on any.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np

from backend.calls import CALL, CANCEL_CALL, ERROR, INTERNAL_PREFIX, REASON, TEXT
from backend.errors import BackendError, DecoderGone, EngineFailed
from backend.io import OUTPUTS
from backend.parsing import PROBE
from backend.settings import FacadeSettings

TIMEOUT_MARGIN_S: Final = 5.0
"""How much longer than its deadline a request is waited for: the decoder answers it with what there is."""

_CREDENTIALS: Final = frozenset({"authorization", "api_key"})
_SCHEME: Final = re.compile("^ *bearer ", re.IGNORECASE)
_LOGPROBS: Final = "logprobs"
_ALL_OUTPUTS: Final = [port.name for port in OUTPUTS]


class Statuses(Protocol):
    """Our errors as the server's."""

    def error(self, error: Exception) -> Any:
        """The server's error object."""
        ...

    def named(self, status: str, text: str) -> Any:
        """The server's error object for the name of a status."""
        ...


class AskedCall(Protocol):
    """One request at the facade, while it is being asked."""

    @property
    def call_id(self) -> str:
        """Its name at the decoder."""
        ...

    def received(self, decoder_pid: int) -> None:
        """The decoder has the call."""
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
    def decoder(self) -> str:
        """Name of the model that is asked."""
        return self._settings.facade_for

    @property
    def final_flag(self) -> Any:
        """Marks the only response as the last."""
        return self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def patience_s(self, request: Any) -> float:
        """How long the answer may take: the request's own timeout counts, if it has one."""
        micros = request.timeout() or _whole(_parameters(request).get("timeout"))
        limit = self._settings.answer_timeout_s
        return min(limit, micros / 1e6 + TIMEOUT_MARGIN_S) if micros > 0 else limit

    def credential(self, request: Any) -> str:
        """What the caller shows, as it came: whom open requests are counted for. Who it is, only the decoder
        knows. Empty if nothing is shown.
        """
        shown = [str(value) for name, value in _parameters(request).items() if name.lower() in _CREDENTIALS]
        return _SCHEME.sub("", shown[0]).strip() if shown else ""

    def answer(self, request: Any, call: AskedCall) -> Any:
        """The one response for `request`: the decoder's, or an error."""
        try:
            return self._ask(request, call)
        except BackendError as error:
            return self.refuse(error)
        except Exception as error:  # pb_utils raises its own type: unknown model, model not ready
            return self.refuse(DecoderGone(f"{self.decoder}: {error}"))

    def refuse(self, error: BackendError) -> Any:
        """A response that carries `error`."""
        return self._pb.InferenceResponse(error=self._statuses.error(error))

    def cancel(self, call_id: str) -> None:
        """Have the decoder end a call. Waits for its word; raises the server's own error type."""
        for _ in self._exec({CANCEL_CALL: call_id}, inputs=[], outputs=_ALL_OUTPUTS[:1]):
            pass

    def _ask(self, request: Any, call: AskedCall) -> Any:
        inputs = [tensor for tensor in request.inputs() if tensor.name() != "stream"]
        responses = self._exec(
            _forwarded(_parameters(request)) | {CALL: call.call_id},
            inputs=inputs,
            request_id=request.request_id(),
            timeout=request.timeout(),
        )
        answer: Any = None
        for response in responses:  # to its end: a stub with half-read answers cannot exit
            if response.has_error():  # the server's own: the decoder is not there, or just died
                raise DecoderGone(f"{self.decoder}: {response.error().message()}")
            tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
            if REASON in tensors:
                answer = self._answer_of(tensors, wanted=list(request.requested_output_names()))
            elif tensors:
                call.received(int(_read(tensors[TEXT])))
        if answer is None:
            raise EngineFailed(f"{self.decoder}: ended without an answer")
        return answer

    def _exec(
        self,
        parameters: Mapping[str, object],
        *,
        inputs: list[Any],
        outputs: list[str] = _ALL_OUTPUTS,
        request_id: str = "",
        timeout: int = 0,
    ) -> Iterator[Any]:
        question = self._pb.InferenceRequest(
            model_name=self.decoder,
            request_id=request_id,
            requested_output_names=outputs,
            inputs=[*inputs, self._pb.Tensor("stream", np.array([False]))],
            timeout=timeout,
            parameters=dict(parameters),
        )
        responses: Iterator[Any] = question.exec(decoupled=True)
        return responses

    def _answer_of(self, tensors: Mapping[str, Any], *, wanted: list[str]) -> Any:
        """What the decoder said as a response: the outputs the caller named, or all of them."""
        found, _, status = _read(tensors[REASON]).partition(ERROR)
        if status and not found:
            error = self._statuses.named(status, _read(tensors[TEXT]))
            return self._pb.InferenceResponse(error=error)
        absent = self._pb.Tensor(_LOGPROBS, np.empty(0, np.float32))  # those nobody asked the decoder for
        outputs = {_LOGPROBS: absent} | dict(tensors)
        return self._pb.InferenceResponse(output_tensors=[outputs[name] for name in wanted or _ALL_OUTPUTS])


def _parameters(request: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = json.loads(request.parameters() or "{}")
    return parameters


def _forwarded(parameters: Mapping[str, Any]) -> dict[str, object]:
    """`stream` is decided here; a probe stays one. Calls take no floats, but the decoder reads texts."""
    return {
        name: repr(value) if isinstance(value, float) else value
        for name, value in parameters.items()
        if name == PROBE or (name != "stream" and not name.startswith(INTERNAL_PREFIX))
    }


def _whole(value: object) -> int:
    """A timeout as the decoder will read it; 0 for what it will refuse."""
    try:
        whole = int(value) if isinstance(value, int | str) else 0
    except ValueError:
        return 0
    return whole if whole < 2**63 else 0


def _read(tensor: Any) -> str:
    return bytes(tensor.as_numpy()[0]).decode("utf-8")
