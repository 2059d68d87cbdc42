"""The door to TensorRT: what it logged is kept as the reason of an error; what is missing is named."""

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import tensorrt_rtx

from engines import trt
from engines.errors import DeviceError
from engines.trt import Messages, deserialise, load_tensorrt, trt_logger
from tests.engines.conftest import refusal


def test_messages_after_a_point_are_the_reason() -> None:
    messages = Messages()
    messages.add("error: of before")
    point = messages.count
    assert messages.after(point) == "no reason in TensorRT's log"
    messages.add("warning: a line\n  and its next")
    messages.add("error: another")
    assert messages.after(point) == "warning: a line and its next; error: another"


def test_only_the_last_messages_are_kept_and_fewer_shown() -> None:
    messages = Messages()
    for number in range(1000):
        messages.add(f"error {number}")
    assert messages.count == 1000
    assert messages.after(0) == "error 997; error 998; error 999"
    assert messages.after(999) == "error 999"


def test_messages_of_many_threads_are_all_counted() -> None:
    messages, begin = Messages(), threading.Barrier(4)

    def work() -> None:
        begin.wait(10)
        for _ in range(500):
            messages.add("error: same")
            messages.after(0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert messages.count == 2000


def test_the_logger_is_one_that_the_real_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX has the same binding, and its parser runs without a GPU."""
    monkeypatch.setattr(trt, "load_tensorrt", lambda: tensorrt_rtx)
    monkeypatch.setattr(trt, "messages", messages := Messages())
    logger = trt_logger.__wrapped__()
    network = tensorrt_rtx.Builder(logger).create_network(0)
    assert not tensorrt_rtx.OnnxParser(network, logger).parse(b"no graph")
    assert "Failed to parse the ONNX model" in messages.after(0)
    said = messages.count
    logger.log(tensorrt_rtx.ILogger.Severity.INFO, "all is well")
    assert messages.count == said, "only warnings and errors are kept"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "require_driver", lambda: None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(
        DeviceError, match=r"TensorRT: expected its Python package.*install the extra gpu-cu13"
    ):
        load_tensorrt()


def test_the_driver_is_asked_before_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Runtime would end the process without one."""

    def none() -> None:
        raise DeviceError("driver: none")

    monkeypatch.setattr(trt, "require_driver", none)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(DeviceError, match="driver: none"):
        load_tensorrt()
    assert "tensorrt" not in sys.modules


def test_a_refused_plan_gives_the_librarys_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Messages()
    messages.add("error: of before")

    class Runtime:
        def __init__(self, logger: Any) -> None:
            pass

        def deserialize_cuda_engine(self, plan: memoryview) -> None:
            messages.add("error: Magic tag does not match")

    module = ModuleType("tensorrt")
    vars(module).update(Runtime=Runtime, __version__="10.16.1.11")
    monkeypatch.setattr(trt, "load_tensorrt", lambda: module)
    monkeypatch.setattr(trt, "trt_logger", lambda: None)
    monkeypatch.setattr(trt, "messages", messages)
    error = refusal(lambda: deserialise(memoryview(b"ftrt")))
    assert error.step == "deserialise"
    assert error.expected == "a plan that TensorRT 10.16.1.11 loads"
    assert error.found == "error: Magic tag does not match"
