"""A facade between any client and any decoder: one response to each, and no name of ours forwarded."""

import json
from typing import Any

import numpy as np

from backend.calls import CALL, ERROR
from backend.errors import BackendError
from backend.facade import Facade
from backend.io import OUTPUTS
from backend.parsing import PROBE
from backend.settings import FacadeSettings
from backend.triton import _Statuses
from tests.backend.pb_double import DecoderPb, FakePb, request
from tests.fuzz.contract import plain
from tests.fuzz.source import Source, chunked

_NAMES = tuple(port.name for port in OUTPUTS)
_PARAMETERS = (
    "timeout", "api_key", "authorization", "temperature", "stream", "triton_x", CALL, PROBE, "seed", "\u017f",
)  # fmt: skip
EXAMPLES = (
    b"\x01\x01\x01" + bytes([_PARAMETERS.index("triton_x")]),
    b"\x01\x00\x02\x01\x03" + b"\x01" + b"\x01\x00\x00" + chunked(b"hi"),
    b"\x02\x01\x04\x00\x07\x02\x05\x01\x02\x01",
    b"\x00\x02\x01" + bytes([_NAMES.index("text_output"), 0]) + chunked(b"17"),
    b"\x00\x02\x02" + bytes([_NAMES.index("finish_reason"), 1, 1, 0, 0]) + chunked(b"no"),
)
_TEXTS = (ERROR.encode() + b"INVALID_ARG", b"stop", ERROR.encode() + b"XX", b"9" * 5000, b"-1", b"\xff", b"")


class _Call:
    call_id = "0" * 32

    def received(self, decoder_pid: int) -> None:
        assert isinstance(decoder_pid, int)


def target(data: bytes) -> None:
    source = Source(data)
    parameters: dict[str, Any] = {}
    for _ in range(source.byte() % 4):
        value = source.scalar()
        if value is not None:
            parameters[source.name(_PARAMETERS)] = value
    responses = [_response(source) for _ in range(source.byte() % 4)]
    pb = DecoderPb(lambda question: responses)
    facade = Facade(pb, FacadeSettings("decoder"), statuses=_Statuses(FakePb))
    asked = request(None, json.loads(json.dumps(parameters)))
    assert 0 < facade.patience_s(asked) <= 86_400
    assert isinstance(facade.credential(asked), str)
    answer = facade.answer(asked, _Call())
    if answer.has_error():
        text = answer.error().message()
        if not text.startswith("decoder: ") and not _said_by_decoder(text, responses):
            plain(BackendError(text))
    else:
        assert len(answer.output_tensors()) == len(_NAMES)
    for question in pb.questions:
        forwarded = question["parameters"].keys() - {CALL, PROBE, "stream"}
        assert not [name for name in forwarded if name.startswith("triton_")]


def _said_by_decoder(text: str, responses: list[Any]) -> bool:
    values = [tensor.array[0] for response in responses for tensor in response.output_tensors()]
    return any(isinstance(value, bytes) and value.decode("utf-8", "replace") == text for value in values)


def _response(source: Source) -> Any:
    if source.byte() % 8 == 7:
        return FakePb.InferenceResponse(error=FakePb.TritonError(source.text(), "INTERNAL"))
    tensors = []
    for _ in range(source.byte() % 9):
        name = source.choice(_NAMES)
        blob = source.choice(_TEXTS) if source.byte() & 1 else source.chunk()
        tensors.append(FakePb.Tensor(name, np.array([blob, None], np.object_)[:-1]))
    return FakePb.InferenceResponse(tensors)
