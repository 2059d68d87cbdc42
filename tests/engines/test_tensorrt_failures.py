"""Whatever fails on the GPU, the TensorRT engine says so with its own errors and holds nothing afterwards.

The driver and TensorRT fail on cue (see tests/rig). The fixture `rig` itself asserts that nothing stays
allocated, no context stays pushed, and nobody used the driver wrongly.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.contract import Engine, LaneId
from engines.decoder import Decoder
from engines.errors import DeviceError, DeviceLostError, EngineError, ReleaseError, StepError
from engines.options import EngineOptions
from engines.tensorrt_engine import TensorRTEngine
from tests.engines import behaviours
from tests.gpu.on_host import OnHost
from tests.resident_memory import resident_bytes
from tests.rig.driver import LAUNCH_FAILED
from tests.rig.plugin import Rig
from tests.rig.releases import open_on_rig, read_release, rig_release

PROMPT = np.arange(1, 20)


@pytest.fixture(scope="module")
def release(module_rig: Rig, small_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig_release(small_decoder, tmp_path_factory.mktemp("r"))


def load(release: Path) -> None:
    """All that a load does on the device: open, warm up, one step, close."""
    engine = open_on_rig(release)
    try:
        for _ in engine.prewarm():
            pass
        np.asarray(engine.prefill(LaneId(0), PROMPT, 0).array)
    finally:
        engine.close()


def calls_of_a_load(rig: Rig, release: Path, name: str) -> int:
    before = rig.gpu.calls(name)
    load(release)
    return rig.gpu.calls(name) - before


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemHostAlloc"])
def test_a_load_fails_cleanly_whichever_allocation_fails(rig: Rig, release: Path, name: str) -> None:
    held, calls = rig.gpu.held, calls_of_a_load(rig, release, name)
    assert calls >= 2
    for nth in range(1, calls + 1):
        rig.gpu.fail(name, nth=nth, times=2)
        with pytest.raises(ReleaseError, match=r"gpu_memory|OutOfMemory"):
            load(release)
        rig.gpu.forget_failures()  # pycuda asks twice for device memory; nobody else does
        assert rig.gpu.held == held, f"allocation {nth} of {calls}"
    load(release)


GRAPHS = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate")  # without them steps run plain


@pytest.mark.parametrize(
    "name",
    [
        "cuStreamCreate", "cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync", "cuMemsetD8Async", "cuStreamSynchronize", "cuMemGetInfo", "cuGraphLaunch",
        "enqueue",
    ],
)  # fmt: skip
def test_a_load_fails_cleanly_whichever_call_fails(rig: Rig, release: Path, name: str) -> None:
    held, calls = rig.gpu.held, calls_of_a_load(rig, release, name)
    for nth in sorted({1, 2, calls // 2, calls} & set(range(1, calls + 1))):
        rig.gpu.fail(name, nth=nth, result=LAUNCH_FAILED)
        try:
            load(release)
            failed = False
        except EngineError:
            failed = True
        came = rig.gpu.forget_failures() == 0
        assert came, f"{name} number {nth} was not called"
        closing = nth == calls  # the last of them may belong to close, which goes on whatever the device says
        recording = name == "enqueue"  # a recording that fails leaves the step without a graph
        assert failed or closing or recording, f"{name} number {nth} failed and nobody said so"
        assert rig.gpu.held == held, f"{name} number {nth} of {calls}"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_load_fails_cleanly_where_the_context_is_refused(rig: Rig, release: Path, nth: int) -> None:
    """To open, to warm up; a close that is refused it can give nothing back."""
    rig.gpu.fail("cuCtxPushCurrent", nth=nth, result=LAUNCH_FAILED)
    with pytest.raises(EngineError):
        load(release)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_load_goes_on_without_graphs(rig: Rig, release: Path, name: str) -> None:
    for nth in (1, 2):
        rig.gpu.fail(name, nth=nth, result=LAUNCH_FAILED)
        load(release)


@pytest.mark.parametrize("method", ["create_execution_context", "set_optimization_profile_async"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_refusal_of_tensorrt_is_told_in_its_words(rig: Rig, release: Path, method: str, nth: int) -> None:
    rig.trt.fail(method, nth=nth)
    with pytest.raises(DeviceError, match="a test asked for it"):
        load(release)


def test_a_plan_that_tensorrt_refuses_is_told_in_its_words(rig: Rig, release: Path) -> None:
    rig.trt.fail("deserialize_cuda_engine")
    with pytest.raises(ReleaseError, match=r"deserialise: expected a plan .* found .*a test asked for it"):
        load(release)


@pytest.mark.parametrize("method", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_a_step_that_tensorrt_refuses_fails_and_the_next_one_works(
    rig: Rig, release: Path, method: str
) -> None:
    engine = OnHost(open_on_rig(release))
    before = behaviours.prefill(engine, 0, PROMPT)
    steps: list[Callable[[], object]] = [
        lambda: engine.prefill(LaneId(1), PROMPT[:7], 0),
        lambda: engine.decode([LaneId(0), LaneId(1)], np.array([1, 2]), np.array([19, 7])),
        lambda: engine.decode([LaneId(0), LaneId(3)], np.array([1, 2]), np.array([19, 0])),
    ]
    for step in steps[:1] if method == "set_tensor_address" else steps:  # decodes are bound once
        rig.trt.fail(method)
        with pytest.raises(StepError, match=r"TensorRT: .*a test asked for it"):
            step()
        assert np.array_equal(behaviours.prefill(engine, 2, PROMPT), before)
        step()
    behaviours.decode_equals_prefill(engine)
    engine.close()


def test_a_kernel_that_fails_later_fails_the_step_that_reads_it(rig: Rig, release: Path) -> None:
    """Steps return while the GPU still works: whoever asks for the logits learns of it."""
    engine = open_on_rig(release)
    logits = engine.prefill(LaneId(0), np.arange(1, 9), 0)
    rig.gpu.fail("cuStreamSynchronize", result=LAUNCH_FAILED)
    with pytest.raises(StepError, match="the step that wrote these logits failed"):
        np.asarray(logits.array)
    assert np.isfinite(np.asarray(engine.prefill(LaneId(0), np.arange(1, 9), 0).array)).all()
    engine.close()


def test_copies_of_blocks_that_fail_are_failed_steps(rig: Rig, release: Path) -> None:
    engine = open_on_rig(release)
    room = [np.zeros(engine.spec.block_nbytes, np.uint8) for _ in range(3)]
    for nth in (1, 3):
        rig.gpu.fail("cuMemcpy3DAsync", nth=nth, result=LAUNCH_FAILED)
        with pytest.raises(StepError):
            engine.export_blocks(LaneId(0), range(3), room)
        rig.gpu.fail("cuMemcpy3DAsync", nth=nth, result=LAUNCH_FAILED)
        with pytest.raises(StepError):
            engine.import_blocks(LaneId(0), range(3), room)
        assert rig.gpu.pending == 0, "buffers went back to the caller while copies were under way"
    behaviours.blocks_round_trip(OnHost(engine))
    engine.close()


def test_a_dead_device_does_not_keep_an_engine_from_closing(rig: Rig, release: Path) -> None:
    engine = open_on_rig(release)
    rig.gpu.fail("cuStreamSynchronize", result=LAUNCH_FAILED)
    engine.close()


def break_device(rig: Rig, engine: TensorRTEngine) -> None:
    """A kernel in the engine's stream writes where nothing is; the driver tells whoever calls it next."""

    def illegal_address() -> None:
        raise MemoryError

    assert engine._parts is not None
    with engine._device.current():
        rig.gpu.launch(engine._parts.stream.handle, illegal_address)


def mend_device(rig: Rig) -> None:
    assert rig.gpu.forgive() == LAUNCH_FAILED
    assert any("a kernel failed" in complaint for complaint in rig.gpu.take_complaints())


def test_a_kernel_that_breaks_the_device_is_no_failed_step(rig: Rig, release: Path) -> None:
    """The driver repeats the error for ever: callers must learn that no other step will work either."""
    engine = open_on_rig(release)
    logits = engine.prefill(LaneId(0), PROMPT, 0)
    room = [np.zeros(engine.spec.block_nbytes, np.uint8)]
    break_device(rig, engine)
    calls: list[Callable[[], object]] = [
        lambda: np.asarray(logits.array),
        lambda: engine.prefill(LaneId(1), PROMPT[:7], 0),
        lambda: engine.decode([LaneId(0)], np.array([1]), np.array([19])),
        lambda: engine.export_blocks(LaneId(0), range(1), room),
        lambda: engine.import_blocks(LaneId(0), range(1), room),
        lambda: next(engine.prewarm()),
    ]
    for call in calls:
        with pytest.raises(DeviceLostError, match="failed"):
            call()
    engine.close()
    mend_device(rig)


def test_a_step_that_tensorrt_refuses_on_a_lost_device_is_no_failed_step(rig: Rig, release: Path) -> None:
    engine = open_on_rig(release)
    break_device(rig, engine)
    rig.trt.fail("execute_async_v3")
    with pytest.raises(DeviceLostError, match="a test asked for it"):
        engine.prefill(LaneId(1), PROMPT[:7], 0)
    engine.close()
    mend_device(rig)


def damaged(plan: bytes) -> dict[str, bytes]:
    return {
        "last byte cut": plan[:-1],
        "first byte flipped": bytes([plan[0] ^ 1]) + plan[1:],
        "empty": b"",
        "TensorRT-RTX": b"vtrt" + plan[4:],
        "graph cut": plan[:200],
        "another version": plan[:24] + b"\x0a" + plan[25:],
    }


def test_fifty_failed_loads_leave_device_and_host_memory_as_they_were(rig: Rig, release: Path) -> None:
    manifest, files = read_release(release)
    plans = list(damaged(bytes(files[manifest.graph])).values())
    kinds: list[Callable[[], object]] = [
        *(lambda plan=plan: open_damaged(plan) for plan in plans),
        lambda: (rig.gpu.fail("cuMemAlloc", nth=4, times=2), open_on_rig(release)),
        lambda: (rig.gpu.fail("cuMemHostAlloc", nth=2), open_on_rig(release)),
        lambda: (rig.trt.fail("deserialize_cuda_engine"), open_on_rig(release)),
        lambda: (rig.trt.fail("create_execution_context", nth=2), open_on_rig(release)),
        lambda: (rig.trt.fail("execute_async_v3", nth=3), load(release)),
    ]

    def open_damaged(plan: bytes) -> Engine:
        changed = {**files, manifest.graph: memoryview(plan)}
        return TensorRTEngine(manifest, changed, options=EngineOptions(), digest="damaged")

    held = rig.gpu.held
    for number in range(150):
        with pytest.raises(EngineError):
            kinds[number % len(kinds)]()
        assert rig.gpu.held == held, f"load {number}"
        if number == 99:
            before = resident_bytes()
    kept = resident_bytes() - before
    assert kept < 50 * len(files[manifest.graph]) // 4, "host memory grows with failed loads"
