"""What can be checked of the Triton side without a server; tests through a real one are end to end."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backend.calls import Call
from backend.errors import ConfigError, DecoderGone, EngineFailed, InvalidRequest, Overloaded
from backend.generation import Delta, FinishReason, Usage
from backend.io import INPUTS, OUTPUTS
from backend.triton import ResponseTensors, TritonPythonModel, TritonSender, _pb_utils, _Statuses
from tests.backend.doubles import generation
from tests.backend.pb_double import FINAL, FakePb, Wire

ROOT = Path(__file__).resolve().parents[2]


def encode(wanted=(), **options):
    request = replace(generation([1, 2]), **options)
    return ResponseTensors(FakePb, frozenset(wanted), request)


def values(tensors):
    return {tensor.name(): tensor.array.tolist() for tensor in tensors}


def test_log_lines_have_their_letters_whatever_the_locale():
    written = ascii("hömé → \udcff")
    program = f"import logging, backend.triton as triton; triton._log_to_stderr(); logging.warning({written})"
    ran = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program],
        env={"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}, cwd=ROOT, capture_output=True, timeout=30,
        check=True,
    )  # fmt: skip
    assert "hömé → \\udcff" in ran.stderr.decode()


LAST = Delta(" end", [5], [-0.5], FinishReason.STOP, Usage(7, 3, 2, 0.1))


def test_whoever_may_not_know_what_was_cached_is_told_nought():
    told = values(encode(("num_cached_tokens", "num_input_tokens"), hides_cached_tokens=True)(LAST))
    assert told == {"num_cached_tokens": [0], "num_input_tokens": [7]}


def test_details_are_logged_of_our_own_rooms_and_of_no_library():
    program = (
        "import asyncio, logging, backend.triton as triton; triton._log_to_stderr()\n"
        "triton._log_in_detail('debug'); logging.getLogger('cachemgr.tiers.fetching').debug('why')\n"
        "asyncio.new_event_loop().close()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=30, check=True, text=True
    )
    assert ran.stderr.endswith("cachemgr.tiers.fetching: why\n")
    assert ran.stderr.count("\n") == 1


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
        (DecoderGone("late"), "UNAVAILABLE"),
        (EngineFailed("broken"), "INTERNAL"),
    ],
)
def test_an_error_goes_out_with_its_status_and_final_in_one(error, code):
    wire = Wire()
    sender(wire, encode()).send(Delta(error=error), final=True)
    [(response, flags)] = wire.sent
    assert (response.error().code, str(response.error()), flags) == (code, str(error), FINAL)


def test_a_facade_gets_an_error_as_data_and_final_by_itself():
    wire = Wire()
    out = TritonSender(FakePb, wire, statuses=_Statuses(FakePb), encode=encode(), call=Call())
    out.send(Delta(error=Overloaded("full")), final=True)
    (response, flags), last = wire.sent
    assert (response.has_error(), flags, last) == (False, 0, (None, FINAL))
    assert values(response.output_tensors()) == {
        "finish_reason": [b"error UNAVAILABLE"],
        "text_output": [b"full"],
    }


def test_a_facades_call_is_cancelled_by_its_call_and_every_one_by_the_server():
    wire, call = Wire(), Call()
    facades = TritonSender(FakePb, wire, statuses=_Statuses(FakePb), encode=encode(), call=call)
    assert not facades.cancelled()
    call.cancelled = True
    assert facades.cancelled()
    gone = Wire(cancelled=True)  # a client that wrote what facades write, and hung up
    facades = TritonSender(FakePb, gone, statuses=_Statuses(FakePb), encode=encode(), call=Call())
    assert (facades.cancelled(), sender(gone, encode()).cancelled()) == (True, True)


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
