"""What can be checked of the Triton side without a server; tests through a real one are end to end."""

import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from backend.errors import ConfigError, DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded
from backend.facade import ASKED_BY_FACADE, Facade, FacadeService
from backend.generation import Delta, FinishReason, Usage
from backend.io import INPUTS, OUTPUTS
from backend.settings import FacadeSettings
from backend.triton import ResponseTensors, TritonPythonModel, TritonSender, _pb_utils, _Statuses
from tests.backend.doubles import generation

ROOT = Path(__file__).resolve().parents[2]
FINAL = 1


class FakePb:  # names are Triton's
    """The few names of pb_utils that responses are made of."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    class TritonError(Exception):
        INTERNAL, INVALID_ARG, UNAVAILABLE = "INTERNAL", "INVALID_ARG", "UNAVAILABLE"

        def __init__(self, message, code):
            super().__init__(message)
            self.code = code

        def message(self):
            return str(self)

    @staticmethod
    def Tensor(name, array):  # noqa: N802
        return SimpleNamespace(name=lambda: name, array=array)

    @staticmethod
    def InferenceResponse(output_tensors=None, error=None):  # noqa: N802
        return SimpleNamespace(
            output_tensors=lambda: output_tensors or [],
            error=lambda: error,
            has_error=lambda: error is not None,
        )


class Wire:
    """A response sender that remembers."""

    def __init__(self):
        self.sent = []

    def send(self, response=None, flags=0):
        self.sent.append((response, flags))

    def is_cancelled(self):
        return False


def encode(wanted=(), **options):
    request = generation([1, 2])
    if options.get("logprobs"):
        request = SimpleNamespace(logprobs=True)
    return ResponseTensors(FakePb, frozenset(wanted), release="abc", generation=request)


def values(tensors):
    return {tensor.name(): tensor.array.tolist() for tensor in tensors}


LAST = Delta(" end", [5], [-0.5], FinishReason.STOP, Usage(7, 3, 2, 0.1))


def test_a_delta_carries_text_and_ids_and_the_last_one_the_totals():
    assert values(encode()(Delta("hé", [3, 4]))) == {"text_output": ["hé".encode()], "output_ids": [3, 4]}
    last = values(encode()(LAST))
    assert last.pop("text_output") == [b" end"]
    assert last == {
        "output_ids": [5], "finish_reason": [b"stop"], "num_input_tokens": [7], "num_output_tokens": [3],
        "num_cached_tokens": [2], "release": [b"abc"],
    }  # fmt: skip


def test_outputs_have_the_declared_types():
    declared = {port.name: port.type.numpy for port in OUTPUTS}
    tensors = encode(logprobs=True)(LAST)
    assert {tensor.name(): tensor.array.dtype.type for tensor in tensors} == declared


def test_only_wanted_outputs_are_sent_and_logprobs_only_when_asked():
    assert values(encode(["text_output"])(LAST)) == {"text_output": [b" end"]}
    assert "logprobs" not in values(encode()(LAST))
    assert values(encode(logprobs=True)(LAST))["logprobs"] == [-0.5]


def sender(wire, encode):
    return TritonSender(FakePb, wire, statuses=_Statuses(FakePb), encode=encode)


def test_final_follows_the_last_response():
    wire = Wire()
    out = sender(wire, encode())
    out.send(Delta("a", [3]), final=False)
    out.send(LAST, final=True)
    assert [(response is not None, flags) for response, flags in wire.sent] == [
        (True, 0),
        (True, 0),
        (False, FINAL),
    ]


def test_final_is_sent_even_if_the_response_is_not():
    wire = Wire()

    def broken(delta):
        raise RuntimeError("no tensor")

    with pytest.raises(RuntimeError):
        sender(wire, broken).send(LAST, final=True)
    assert wire.sent == [(None, FINAL)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("seed", "must be a number"), "INVALID_ARG"),
        (Overloaded("full"), "UNAVAILABLE"),
        (DeadlineExceeded("late"), "UNAVAILABLE"),
        (EngineFailed("broken"), "INTERNAL"),
    ],
)
def test_an_error_goes_out_with_its_status_and_final_in_one(error, code):
    wire = Wire()
    sender(wire, encode()).send(Delta(error=error), final=True)
    [(response, flags)] = wire.sent
    assert (response.error().code, str(response.error()), flags) == (code, str(error), FINAL)


def model_config(parameters):
    """Triton's own ModelConfig class, from the server's wheel."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None:
        pytest.skip("the Triton server (nvidia-pytriton) is not installed")
    path = Path(spec.origin).parent / "tritonserver/backends/python/triton_python_backend_utils.py"
    module_spec = importlib.util.spec_from_file_location("triton_utils_for_test", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module.ModelConfig(
        json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], "parameters": parameters})
    )


@pytest.mark.parametrize(
    ("parameters", "decoupled"), [({}, True), ({"facade_for": {"string_value": "x"}}, False)]
)
def test_configuration_is_completed_from_the_table(parameters, decoupled):
    config = TritonPythonModel.auto_complete_config(model_config(parameters)).as_dict()
    assert [entry["name"] for entry in config["input"]] == [port.name for port in INPUTS]
    assert all(entry["optional"] for entry in config["input"])
    assert [entry["name"] for entry in config["output"]] == [port.name for port in OUTPUTS]
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": decoupled}


def test_outside_triton_the_reason_is_named():
    with pytest.raises(ConfigError, match="expected to run inside Triton's Python stub"):
        _pb_utils()


def test_model_py_loads_from_a_deployed_folder_without_triton(tmp_path):
    for room in ("backend", "engines", "cachemgr"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "backend" / "model.py", tmp_path / "model.py")
    code = "import model, backend; print(model.TritonPythonModel.__name__, backend.__file__)"
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {code}"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["TritonPythonModel", str(tmp_path / "backend" / "__init__.py")]


class Asked:
    """pb_utils with a decoder behind `exec`, answering with `responses`."""

    def __init__(self, responses):
        self.questions = []
        self.responses = responses

    def __getattr__(self, name):
        return getattr(FakePb, name)

    def InferenceRequest(self, **fields):  # noqa: N802
        self.questions.append(fields)
        return SimpleNamespace(exec=lambda decoupled: iter(self.responses))


def request(wire, parameters=None, inputs=(), outputs=()):
    return SimpleNamespace(
        parameters=lambda: json.dumps(parameters or {}), inputs=lambda: list(inputs), timeout=lambda: 0,
        request_id=lambda: "r1", requested_output_names=lambda: list(outputs),
        get_response_sender=lambda: wire,
    )  # fmt: skip


def facade(responses, **settings):
    pb = Asked(responses)
    return pb, Facade(pb, FacadeSettings(facade_for="decoder", **settings), statuses=_Statuses(FakePb))


def test_the_facade_asks_once_without_streaming_and_forwards_the_credential():
    answer = FakePb.InferenceResponse([FakePb.Tensor("text_output", np.array([b"hi"]))])
    pb, made = facade([answer, FakePb.InferenceResponse([])])
    inputs = [FakePb.Tensor("text_input", np.array([b"?"])), FakePb.Tensor("stream", np.array([True]))]
    sent = made.answer(request(None, {"api_key": "k", "stream": True, "triton_x": 1}, inputs))
    [question] = pb.questions
    assert question["model_name"] == "decoder"
    assert question["parameters"] == {"api_key": "k", ASKED_BY_FACADE: True}
    assert values(question["inputs"]) == {"text_input": [b"?"], "stream": [False]}
    assert question["requested_output_names"] == [port.name for port in OUTPUTS]
    assert values(sent.output_tensors()) == {"text_output": [b"hi"]}


def test_the_facade_passes_errors_on_and_survives_a_missing_decoder():
    refusal = FakePb.InferenceResponse(error=FakePb.TritonError("bad", "INVALID_ARG"))
    assert facade([refusal])[1].answer(request(None)).error().code == "INVALID_ARG"
    pb, made = facade([])
    assert "ended without an answer" in str(made.answer(request(None)).error())
    pb.InferenceRequest = lambda **fields: 1 / 0
    assert made.answer(request(None)).error().code == "INTERNAL"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("top_p", "must be ≤ 1", 2), "INVALID_ARG"),
        (Overloaded("queue is full"), "UNAVAILABLE"),
        (DeadlineExceeded("late"), "UNAVAILABLE"),
        (EngineFailed("broken"), "INTERNAL"),
    ],
)
def test_the_facade_restores_the_status_that_a_bls_call_loses(error, status):
    spelled = _Statuses(FakePb, spelled=True).error(error)
    lost = FakePb.InferenceResponse(error=FakePb.TritonError(str(spelled), "INTERNAL"))
    answer = facade([lost])[1].answer(request(None)).error()
    assert (str(answer), answer.code) == (str(error), status)


class Held(Asked):
    """A decoder that answers when told to."""

    def __init__(self):
        super().__init__(None)
        self.release = threading.Event()
        self.responses = self._slow()

    def _slow(self):
        assert self.release.wait(20)
        yield FakePb.InferenceResponse([FakePb.Tensor("text_output", np.array([b"hi"]))])


def held_service(**settings):
    pb = Held()
    made = Facade(pb, FacadeSettings(facade_for="decoder", **settings), statuses=_Statuses(FakePb))
    return pb, FacadeService(made)


def test_the_facade_refuses_beyond_its_bound_and_answers_each_once():
    pb, service = held_service(max_open_requests=1)
    first, second = Wire(), Wire()
    service.start(request(first))
    service.start(request(second))
    assert second.sent[0][0].error().code == "UNAVAILABLE"
    assert second.sent[0][1] == FINAL
    pb.release.set()
    service.close()
    assert [(response.has_error(), flags) for response, flags in first.sent] == [(False, FINAL)]


def test_a_decoder_that_never_answers_is_given_up_once():
    pb, service = held_service(max_open_requests=1, answer_timeout_s=0.05)
    wire = Wire()
    service.start(request(wire))
    service.close()
    pb.release.set()
    assert [(response.error().code, flags) for response, flags in wire.sent] == [("UNAVAILABLE", FINAL)]
    assert "no answer within 0.05 s" in str(wire.sent[0][0].error())
