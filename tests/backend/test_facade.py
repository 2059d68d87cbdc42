"""The facade against a double of the server: what it asks, what it answers, and how its waits end."""

import os
import signal
import subprocess
import threading

import numpy as np
import pytest

from backend.calls import CALL, CANCEL_CALL
from backend.facade import TIMEOUT_MARGIN_S, Facade
from backend.facade_service import FacadeService
from backend.io import OUTPUTS
from backend.parsing import PROBE
from backend.settings import FacadeSettings
from backend.triton import _Statuses
from tests.backend.pb_double import FINAL, DecoderPb, FakePb, Wire, request

NAMES = [port.name for port in OUTPUTS]
WAIT_S = 20.0


def response(**columns):
    tensors = [
        FakePb.Tensor(name, np.array([value], dtype=object if isinstance(value, bytes) else None))
        for name, value in columns.items()
    ]
    return FakePb.InferenceResponse(tensors)


def receipt(pid=None):
    return response(text_output=str(pid or os.getpid()).encode())


ANSWER = response(
    text_output=b"hi", output_ids=5, finish_reason=b"stop", num_input_tokens=1, num_output_tokens=1,
    num_cached_tokens=0, release=b"abc",
)  # fmt: skip
EMPTY = FakePb.InferenceResponse([])


class Receiver:
    call_id = "0" * 32

    def __init__(self):
        self.pids = []

    def received(self, pid):
        self.pids.append(pid)


def facade(*responses, **settings):
    pb = DecoderPb(lambda question: responses)
    return pb, Facade(pb, FacadeSettings(facade_for="decoder", **settings), statuses=_Statuses(FakePb))


def values(sent):
    return {tensor.name(): tensor.array.tolist() for tensor in sent.output_tensors()}


def test_it_asks_once_without_streaming_and_forwards_the_credential():
    pb, made = facade(receipt(), ANSWER, EMPTY)
    inputs = [FakePb.Tensor("text_input", np.array([b"?"])), FakePb.Tensor("stream", np.array([True]))]
    given = {"api_key": "k", "stream": True, CALL: "f" * 32, CANCEL_CALL: "1", "triton_x": 1, PROBE: True}
    call = Receiver()
    sent = made.answer(request(None, given, inputs), call)
    [question] = pb.questions
    assert question["model_name"] == "decoder"
    assert question["parameters"] == {"api_key": "k", PROBE: True, CALL: call.call_id}
    asked = {tensor.name(): tensor.array.tolist() for tensor in question["inputs"]}
    assert asked == {"text_input": [b"?"], "stream": [False]}
    assert values(sent)["text_output"] == [b"hi"]
    assert call.pids == [os.getpid()]


def test_floats_go_as_texts_because_a_call_takes_none():
    pb, made = facade(ANSWER)
    given = {"temperature": 0.7, "top_p": 1e-05, "seed": 7, "ignore_eos": True}
    assert not made.answer(request(None, given), Receiver()).has_error()
    sent = {name: value for name, value in pb.questions[0]["parameters"].items() if name != CALL}
    assert sent == {"temperature": "0.7", "top_p": "1e-05", "seed": 7, "ignore_eos": True}


def test_every_output_is_asked_for_and_only_those_named_are_passed_on():
    pb, made = facade(ANSWER)
    assert list(values(made.answer(request(None), Receiver()))) == NAMES
    assert values(made.answer(request(None, outputs=["logprobs"]), Receiver())) == {"logprobs": []}
    named = made.answer(request(None, outputs=["release", "text_output"]), Receiver())
    assert values(named) == {"release": [b"abc"], "text_output": [b"hi"]}
    assert [question["requested_output_names"] for question in pb.questions] == [NAMES] * 3


def test_an_error_written_as_data_is_an_error_again():
    _, made = facade(receipt(), response(finish_reason=b"error INVALID_ARG", text_output=b"top_p: wrong"))
    error = made.answer(request(None), Receiver()).error()
    assert (error.code, str(error)) == ("INVALID_ARG", "top_p: wrong")


def test_a_decoder_that_is_not_there_is_unavailable():
    refused = FakePb.InferenceResponse(error=FakePb.TritonError("not healthy", "INTERNAL"))
    error = facade(refused)[1].answer(request(None), Receiver()).error()
    assert (error.code, str(error)) == ("UNAVAILABLE", "decoder: not healthy")
    pb, made = facade()
    assert "ended without an answer" in str(made.answer(request(None), Receiver()).error())
    pb.InferenceRequest = lambda **question: 1 / 0
    assert made.answer(request(None), Receiver()).error().code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("asked", "patience_s"),
    [
        (request(None), 60),
        (request(None, timeout=2_000_000), 2 + TIMEOUT_MARGIN_S),
        (request(None, {"timeout": 2_000_000}), 2 + TIMEOUT_MARGIN_S),
        (request(None, {"timeout": "2000000"}), 2 + TIMEOUT_MARGIN_S),
        (request(None, {"timeout": "soon"}), 60),
        (request(None, {"timeout": "9" * 400}), 60),
        (request(None, {"timeout": -1}), 60),
        (request(None, timeout=10**12), 60),
    ],
)
def test_the_timeout_of_a_request_bounds_its_wait(asked, patience_s):
    assert facade(answer_timeout_s=60)[1].patience_s(asked) == patience_s


class Held:
    """A decoder that sends a receipt, and the answer when told to or when its call is cancelled."""

    def __init__(self, pid=None):
        self.release = threading.Event()
        self.cancelled = []
        self._pid = pid

    def answer(self, question):
        if CANCEL_CALL in question["parameters"]:
            self.cancelled.append(question["parameters"][CANCEL_CALL])
            self.release.set()
            return
        yield receipt(self._pid)
        assert self.release.wait(WAIT_S)
        yield ANSWER


def held_service(held, **settings):
    pb = DecoderPb(held.answer)
    made = Facade(pb, FacadeSettings(facade_for="decoder", **settings), statuses=_Statuses(FakePb))
    return pb, FacadeService(made)


def test_it_refuses_beyond_its_bound_and_answers_each_once():
    held = Held()
    _, service = held_service(held, max_open_requests=1)
    first, second = Wire(), Wire()
    service.start(request(first))
    service.start(request(second))
    assert second.sent[0][0].error().code == "UNAVAILABLE"
    assert second.sent[0][1] == FINAL
    held.release.set()
    service.close()
    assert [(answer.has_error(), flags) for answer, flags in first.sent] == [(False, FINAL)]
    assert held.cancelled == []


def test_one_caller_gets_half_of_the_places_and_others_the_rest():
    held = Held()
    _, service = held_service(held, max_open_requests=4)

    def started(**parameters):
        wire = Wire()
        service.start(request(wire, parameters))
        return wire

    flood = [started(api_key="f"), started(authorization="Bearer f")]
    refused = [started(api_key="f"), started(AUTHORIZATION="bearer  f")]
    others = [started(api_key="o"), started()]
    for wire in refused:
        error = wire.sent[0][0].error()
        assert error.code == "UNAVAILABLE"
        assert str(error) == "2 requests of this caller are open, half of what max_open_requests is (4)"
    held.release.set()
    service.close()
    assert [wire.sent[0][0].has_error() for wire in (*flood, *others)] == [False] * 4
    assert not service._by_credential, "whoever was answered has left"


def test_a_decoder_that_never_answers_is_given_up_once():
    held = Held()
    _, service = held_service(held, answer_timeout_s=0.05)
    wire = Wire()
    service.start(request(wire))
    service.close()
    held.release.set()
    assert [(answer.error().code, flags) for answer, flags in wire.sent] == [("UNAVAILABLE", FINAL)]
    assert "no answer within 0.05 s" in str(wire.sent[0][0].error())


def test_a_client_that_leaves_has_its_own_call_cancelled_once():
    held = Held()
    pb, service = held_service(held)
    stays, leaves = Wire(), Wire(cancelled=True)
    service.start(request(leaves, {"api_key": "leaves"}))
    service.start(request(stays, {"api_key": "stays"}))
    assert held.release.wait(WAIT_S)
    service.close()
    asked = [question["parameters"] for question in pb.questions]
    ids = {given["api_key"]: given[CALL] for given in asked if CALL in given}
    assert held.cancelled == [ids["leaves"]] != [ids["stays"]]
    assert (len(stays.sent), len(leaves.sent)) == (1, 1)


def test_callers_of_a_decoder_that_was_killed_are_told():
    decoder = subprocess.Popen(["sleep", "60"])
    held = Held(decoder.pid)
    _, service = held_service(held)
    wire = Wire()
    service.start(request(wire))
    decoder.send_signal(signal.SIGKILL)
    service.close()
    assert decoder.wait() == -signal.SIGKILL
    held.release.set()
    [(answer, flags)] = wire.sent
    assert (answer.error().code, str(answer.error()), flags) == (
        "UNAVAILABLE", "decoder: its process died", FINAL,
    )  # fmt: skip
