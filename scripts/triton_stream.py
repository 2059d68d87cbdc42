"""Asks a decoder over gRPC streaming, as a user's program would, with tritonclient.

Threads: tritonclient calls back from a thread of its own; answers cross to the caller through one queue.
"""

import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from scripts.errors import TritonError
from scripts.streamed_answer import StreamedAnswer

_TYPES: tuple[tuple[type, str, Any], ...] = (  # bool before int: True is an int too
    (bool, "BOOL", np.bool_),
    (float, "FP32", np.float32),
    (int, "INT32", np.int32),
    (str, "BYTES", np.object_),
    (bytes, "BYTES", np.object_),
)


_REASON_S = 5.0
"""A stream that ended before anything was sent has its reason ready, or nearly so."""


class _EndedInError(TritonError):
    """The server ended the stream with an error, or there was no server."""


_NUMBERS = ("num_input_tokens", "num_output_tokens", "num_cached_tokens")


def tensor(name: str, value: object) -> triton.InferInput:
    """An input of one value, or of a list of values of one type."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if name in ("seed", "random_seed"):
        triton_type, numpy_type = "UINT64", np.uint64
    else:
        triton_type, numpy_type = next(form for kind, *form in _TYPES if isinstance(values[0], kind))
    encoded = [item.encode() if isinstance(item, str) else item for item in values]
    made = triton.InferInput(name, [len(values)], triton_type)
    made.set_data_from_numpy(np.array(encoded, dtype=numpy_type))
    return made


def stream_answer(
    url: str,
    model: str,
    inputs: Mapping[str, object],
    *,
    on_text: Callable[[str], None] = lambda text: None,
    limit_s: float = 120.0,
) -> StreamedAnswer:
    """Send one request and read its stream to the end; TritonError carries Triton's reason."""
    replies: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: replies.put((result, error)))
        tensors = [tensor(name, value) for name, value in inputs.items()]
        started = time.monotonic()
        running = True
        try:
            _send(client, model, tensors, replies)
            answer = _read(replies, started=started, on_text=on_text, limit_s=limit_s)
            running = False
        except _EndedInError:
            running = False
            raise
        finally:  # cancelling a request that has ended makes Triton keep its model for ever
            client.stop_stream(cancel_requests=running)
        return answer


def _send(
    client: triton.InferenceServerClient,
    model: str,
    tensors: list[triton.InferInput],
    replies: "queue.Queue[tuple[Any, Any]]",
) -> None:
    try:
        client.async_stream_infer(model, tensors, enable_empty_final_response=True)
    except InferenceServerException as refused:  # "no longer in valid state": the stream knows why
        try:
            _, reason = replies.get(timeout=_REASON_S)
        except queue.Empty:
            reason = refused
        raise _EndedInError(str(reason)) from None


def _read(
    replies: "queue.Queue[tuple[Any, Any]]", *, started: float, on_text: Callable[[str], None], limit_s: float
) -> StreamedAnswer:
    answer = StreamedAnswer()
    while True:
        try:
            result, error = replies.get(timeout=max(0.0, started + limit_s - time.monotonic()))
        except queue.Empty:
            raise TritonError(f"the stream did not end within {limit_s:g} s") from None
        now = time.monotonic() - started
        if error is not None:
            raise _EndedInError(str(error))
        _take(answer, result, now, on_text)
        if result.get_response().parameters["triton_final_response"].bool_param:
            answer.seconds = now
            return answer


def _take(answer: StreamedAnswer, result: Any, now: float, on_text: Callable[[str], None]) -> None:
    text = result.as_numpy("text_output")
    if text is None:
        return  # the empty final response
    piece = text.reshape(-1)[0].decode("utf-8")
    if piece:
        answer.arrivals.append(now)
        answer.text += piece
        on_text(piece)
    reason = result.as_numpy("finish_reason")
    if reason is None or not reason.reshape(-1)[0]:
        return
    answer.finish_reason = reason.reshape(-1)[0].decode()
    counts = [int(result.as_numpy(name).reshape(-1)[0]) for name in _NUMBERS]
    answer.input_tokens, answer.output_tokens, answer.cached_tokens = counts
    release = result.as_numpy("release")
    answer.release = "" if release is None else release.reshape(-1)[0].decode()
