"""The Triton side: the only module that speaks pb_utils. Requests in, responses and metrics out.

One class serves both kinds of model: a decoder (decoupled) and, where config.pbtxt has the parameter
`facade_for`, a facade (not decoupled) that asks a decoder and joins its answer.

pb_utils exists only inside Triton's Python stub, so it is imported when Triton calls: this module itself
loads anywhere, which is how a deployment is checked without a server.

Threads: Triton calls `initialize`, `execute` and `finalize` on one thread (T1); senders are used by the
replies thread (decoder) or a facade thread.
"""

import io
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backend.calls import CANCEL_CALL, ERROR, REASON, TEXT, Call, Calls
from backend.composition import open_decoder
from backend.environment import config_path, forbid_telemetry, keep_grpc_quiet
from backend.errors import (
    AccessDenied,
    BackendError,
    BackendStuck,
    ConfigError,
    DecoderGone,
    InvalidRequest,
    Overloaded,
)
from backend.facade import Facade
from backend.facade_service import FacadeService
from backend.generation import Delta, Generation
from backend.io import INPUTS, OUTPUTS
from backend.metrics import PREFIX, Counter, Gauge, Histogram, Labels
from backend.service import DecoderService
from backend.settings import read_facade_settings, read_model_settings, read_node_settings
from backend.shared_region import keep_region_private
from cachemgr import CacheError
from engines import EngineError

log = logging.getLogger(__name__)

FACADE_PARAMETER: Final = "facade_for"
ROOMS: Final = ("backend", "cachemgr", "engines")


def _pb_utils() -> Any:
    try:
        import triton_python_backend_utils as pb_utils
    except ImportError as error:
        raise ConfigError(f"pb_utils: expected to run inside Triton's Python stub, found: {error}") from None
    return pb_utils


class TritonPythonModel:
    """What Triton's stub looks for in model.py."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Declare inputs, outputs and the transaction policy, so that config.pbtxt need not."""
        config = auto_complete_model_config
        facade = FACADE_PARAMETER in config.as_dict().get("parameters", {})
        for port in INPUTS:
            config.add_input({**port.as_config(), "optional": port.optional})
        for port in OUTPUTS:
            config.add_output(port.as_config())
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": not facade})
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load everything; a refusal is one line, and Triton keeps serving its other models."""
        self._pb = _pb_utils()
        forbid_telemetry()
        keep_grpc_quiet()
        _log_to_stderr()
        keep_region_private()
        name, version = args["model_name"], args["model_version"]
        try:
            self._service = self._open(args, name, version)
        except (BackendError, EngineError, CacheError) as error:
            log.error("model %s version %s refused: %s", name, version, error)
            raise self._pb.TritonModelException(f"{name}: {error}") from None

    def execute(self, requests: Sequence[Any]) -> None:
        """Start requests and return; answers are sent through response senders."""
        for request in requests:
            self._service.start(request)

    def is_ready(self) -> bool:
        """Newer servers ask this for the model's readiness."""
        return bool(self._service.ready)

    def finalize(self) -> None:
        """Drain and close."""
        if hasattr(self, "_service"):  # not after a refused load
            self._service.close()

    def _open(self, args: Mapping[str, str], name: str, version: str) -> "_Decoder | FacadeService":
        config = json.loads(args["model_config"])
        parameters = {key: entry["string_value"] for key, entry in config.get("parameters", {}).items()}
        if FACADE_PARAMETER in parameters:
            facade = Facade(self._pb, read_facade_settings(parameters), statuses=_Statuses(self._pb))
            return FacadeService(facade)
        if (
            args.get("model_instance_kind") == "GPU"
        ):  # the instance group's GPU, unless a parameter says other
            parameters.setdefault("device", args["model_instance_device_id"])
        settings = read_model_settings(parameters)
        node = read_node_settings(config_path(Path(__file__).resolve().parent.parent))
        _log_in_detail(node.log_level)
        service = open_decoder(
            name,
            Path(args["model_repository"]) / version,
            settings=settings,
            node=node,
            instruments=TritonInstruments(self._pb),
            labels={"model": name, "version": version},
        )
        return _Decoder(self._pb, service)


class _Decoder:
    """Feeds a DecoderService from Triton's requests."""

    def __init__(self, pb_utils: Any, service: DecoderService) -> None:
        self._pb = pb_utils
        self._service = service
        self._statuses = _Statuses(pb_utils)
        self._calls = Calls()

    @property
    def ready(self) -> bool:
        return self._service.ready

    def start(self, request: Any) -> None:
        response_sender = request.get_response_sender()
        parameters = json.loads(request.parameters() or "{}")
        if CANCEL_CALL in parameters:
            self._calls.cancel(parameters[CANCEL_CALL])
            response_sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        call = self._calls.opened(parameters)
        wanted = frozenset(request.requested_output_names())

        def sender(generation: Generation | None) -> TritonSender:
            return TritonSender(
                self._pb,
                response_sender,
                statuses=self._statuses,
                encode=ResponseTensors(self._pb, wanted, generation),
                call=call,
            )

        if request.timeout() and "timeout" not in parameters:
            parameters["timeout"] = request.timeout()
        self._service.handle(
            request.request_id(),
            lambda: _inputs(request),
            parameters,
            sender=sender,
            admitted=lambda: None if call is None else self._send_receipt(response_sender),
        )

    def _send_receipt(self, response_sender: Any) -> None:
        """Tell a facade at once that its call is here, and in which process. Nobody else sends yet.

        Only whoever may ask hears it: clients can write what facades do.
        """
        receipt = [self._pb.Tensor(TEXT, _text(str(os.getpid())))]
        try:
            response_sender.send(self._pb.InferenceResponse(output_tensors=receipt))
        except Exception as error:  # the server's own error type: the caller is gone
            log.warning("a receipt could not be sent: %s", error)

    def close(self) -> None:
        self._service.close()


class ResponseTensors:
    """Turns deltas of one generation into output tensors, only those the caller wants (none named: all).

    `release` is the one that read the request; empty if none did before its end.
    """

    def __init__(self, pb_utils: Any, wanted: frozenset[str], generation: Generation | None) -> None:
        self._pb = pb_utils
        self._wanted = wanted
        self._release = generation.release if generation is not None else ""
        self._logprobs = generation is not None and generation.logprobs
        self._hides_cached = generation is not None and generation.hides_cached_tokens

    def __call__(self, delta: Delta) -> list[Any]:
        """Text and ids always; logprobs if asked for; the reason and the totals with the last delta."""
        columns: dict[str, npt.NDArray[Any]] = {
            "text_output": _text(delta.text),
            "output_ids": np.array(delta.token_ids, dtype=np.int32),
        }
        if self._logprobs:
            columns["logprobs"] = np.array(delta.logprobs, dtype=np.float32)
        if delta.finish is not None and delta.usage is not None:
            columns["finish_reason"] = _text(delta.finish.value)
            columns["num_input_tokens"] = np.array([delta.usage.input_tokens], dtype=np.uint32)
            columns["num_output_tokens"] = np.array([delta.usage.output_tokens], dtype=np.uint32)
            cached = 0 if self._hides_cached else delta.usage.cached_tokens
            columns["num_cached_tokens"] = np.array([cached], dtype=np.uint32)
            columns["release"] = _text(self._release)
        wanted = self._wanted or columns.keys()
        return [self._pb.Tensor(name, array) for name, array in columns.items() if name in wanted]


class TritonSender:
    """The way back to one caller, over Triton's response sender."""

    def __init__(
        self,
        pb_utils: Any,
        response_sender: Any,
        *,
        statuses: "_Statuses",
        encode: ResponseTensors,
        call: Call | None = None,
    ) -> None:
        """`call`: the facade's, which is what can be cancelled then."""
        self._pb = pb_utils
        self._sender = response_sender
        self._statuses = statuses
        self._encode = encode
        self._call = call

    def send(self, delta: Delta, *, final: bool) -> None:
        """One response; FINAL goes out by itself after the last one, but together with an error."""
        flags = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if delta.error is not None and self._call is None:
            self._sender.send(
                self._pb.InferenceResponse(error=self._statuses.error(delta.error)), flags=flags
            )
            return
        try:
            tensors = self._encode(delta) if delta.error is None else self._written(delta.error)
            self._sender.send(self._pb.InferenceResponse(output_tensors=tensors))
        finally:
            if final:
                self._sender.send(flags=flags)

    def _written(self, error: Exception) -> list[Any]:
        """An error for a facade: a call inside the server that gets an error response never ends."""
        columns = {REASON: ERROR + _status_name(error), TEXT: str(error)}
        return [self._pb.Tensor(name, _text(value)) for name, value in columns.items()]

    def cancelled(self) -> bool:
        """True once the caller went away; a client that writes what facades do may hang up itself."""
        return (self._call is not None and self._call.cancelled) or bool(self._sender.is_cancelled())


class _Statuses:
    """Our error tree in Triton's status codes."""

    def __init__(self, pb_utils: Any) -> None:
        self._error = pb_utils.TritonError

    def error(self, error: Exception) -> Any:
        """The server's error object."""
        return self.named(_status_name(error), str(error))

    def named(self, status: str, text: str) -> Any:
        """The server's error object for the name of a status."""
        return self._error(text, getattr(self._error, status))


def _status_name(error: Exception) -> str:
    if isinstance(error, InvalidRequest | AccessDenied):
        return "INVALID_ARG"
    return "UNAVAILABLE" if isinstance(error, Overloaded | DecoderGone | BackendStuck) else "INTERNAL"


class TritonInstruments:
    """Metrics on Triton's own endpoint. Families are kept: a metric dies with its family."""

    def __init__(self, pb_utils: Any) -> None:
        self._families: dict[str, Any] = {}
        self._family_type = pb_utils.MetricFamily

    def counter(self, name: str, description: str, labels: Labels) -> Counter:
        """See Instruments."""
        metric: Counter = self._family(name, description, self._family_type.COUNTER).Metric(
            labels=dict(labels)
        )
        return metric

    def gauge(self, name: str, description: str, labels: Labels) -> Gauge:
        """See Instruments."""
        metric: Gauge = self._family(name, description, self._family_type.GAUGE).Metric(labels=dict(labels))
        return metric

    def histogram(
        self, name: str, description: str, labels: Labels, *, buckets: Sequence[float]
    ) -> Histogram:
        """See Instruments."""
        family = self._family(name, description, self._family_type.HISTOGRAM)
        metric: Histogram = family.Metric(labels=dict(labels), buckets=list(buckets))
        return metric

    def _family(self, name: str, description: str, kind: Any) -> Any:
        if name not in self._families:
            self._families[name] = self._family_type(name=PREFIX + name, description=description, kind=kind)
        return self._families[name]


def _inputs(request: Any) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _text(value: str) -> npt.NDArray[Any]:
    return np.array([value.encode("utf-8")], dtype=np.object_)


def _log_in_detail(level: str) -> None:
    """Our own loggers only: what libraries say at that level is nobody's here."""
    for room in ROOMS:
        logging.getLogger(room).setLevel(level.upper())


def _log_to_stderr() -> None:
    """The stub shares the server's stderr; without a handler Python would drop what is below WARNING.

    Triton starts the stub without a locale, and Python takes that for ASCII: a path or an arrow would be
    written as escapes.
    """
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    if not logging.getLogger().handlers:
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO,
            format="%(levelname).1s %(asctime)s %(name)s: %(message)s",
        )
