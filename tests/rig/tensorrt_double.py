"""A module `tensorrt` that runs plans of plans.py with ONNX Runtime on the stand-in's memory.

It holds what our code uses of TensorRT, with TensorRT's names, enums and ways to fail: None and False with a
line in the logger, never an exception. What TensorRT leaves undefined is a complaint here: an address outside
its allocation or without enough room, one that is not aligned, overlapping activations, a step without a
context on the thread, an output that is not where its input is. `tests/rig/test_signatures.py` compares every
member with the bindings of the real library.
"""

import enum
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tests.rig import plans
from tests.rig.builder_double import BUILDER_TYPES, LayerInformationFormat
from tests.rig.driver import StandIn
from tests.rig.step_runs import Bound, Step, StepRuns

ALIGNMENT = 256
_THIS_THREAD_HAS_NO_CONTEXT = "no context is current on the calling thread"


@dataclass(slots=True)
class Faults:
    """Which calls of the double shall fail: method → how many calls from now (1 = the next), once."""

    after: dict[str, int] = field(default_factory=dict)

    def fail(self, method: str, *, nth: int = 1) -> None:
        """deserialize_cuda_engine and create_execution_context give None; other methods give False."""
        self.after[method] = nth

    def hits(self, method: str) -> bool:
        if method in self.after:
            self.after[method] -= 1
            if self.after[method] == 0:
                del self.after[method]
                return True
        return False

    def heal(self) -> None:
        self.after.clear()


class _Machine:
    """What every object of the double stands on; one per process, as the driver is."""

    gpu: StandIn
    faults: Faults


def module(gpu: StandIn, faults: Faults) -> ModuleType:
    """The module to put in sys.modules; always the same one."""
    _Machine.gpu, _Machine.faults = gpu, faults
    return _MODULE


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class _Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    """To be subclassed with a `log` of one's own."""

    Severity = _Severity

    def __init__(self) -> None:
        pass

    def log(self, severity: _Severity, msg: str) -> None:
        raise NotImplementedError


class Runtime:
    """Deserialises plans."""

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> "ICudaEngine | None":
        if _Machine.gpu.current_device is None:
            _Machine.gpu.complain(f"deserialize_cuda_engine: {_THIS_THREAD_HAS_NO_CONTEXT}")
            return self._refuse("CUDA initialization failure with error: 201")
        if _Machine.faults.hits("deserialize_cuda_engine"):
            return self._refuse("Deserialization failed because a test asked for it")
        content = plans.unpack(memoryview(serialized_engine).cast("B"))
        if isinstance(content, str):
            return self._refuse(content)
        weights = _Machine.gpu.allocate(max(content.weights.nbytes, 1))
        if weights is None:
            return self._refuse(f"OutOfMemory: {content.weights.nbytes} bytes of weights")
        try:
            return ICudaEngine(StepRuns(content), content, weights, self)
        except Exception as error:
            _Machine.gpu.release(weights)
            return self._refuse(f"Deserialization failed: {error}")

    def _refuse(self, reason: str) -> None:
        self._logger.log(ILogger.Severity.ERROR, f"IRuntime::deserializeCudaEngine: Error Code 1: {reason}")


class ICudaEngine:
    """A deserialised plan. It goes with its last reference, and its weights on the device with it."""

    def __init__(self, runs: StepRuns, content: plans.Content, weights: int, runtime: Runtime) -> None:
        self._runs = runs
        self._content = content
        self._runtime = runtime  # its bindings keep it alive, as the real ones do
        self._names = [*runs.inputs, *runs.outputs]
        self._profiles_in_use: set[int] = set()
        weakref.finalize(self, _Machine.gpu.release, weights)

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._content.profiles)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._runs.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        kinds = {"int64": "INT64", "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}
        return DataType[kinds[self._runs.tensor(name).kind]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self._runs.tensor(name).shape)

    def get_tensor_location(self, name: str) -> TensorLocation:
        self._runs.tensor(name)
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return list(self._content.profiles[profile_index][name])

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._runs.aliases.get(name)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self._content.activations[profile_index]

    def create_engine_inspector(self) -> "EngineInspector":
        return EngineInspector(self)

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> "IExecutionContext | None":
        assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED, "the double manages no memory"
        if _Machine.gpu.current_device is None:
            _Machine.gpu.complain(f"create_execution_context: {_THIS_THREAD_HAS_NO_CONTEXT}")
            return None
        if _Machine.faults.hits("create_execution_context"):
            self._complain("createExecutionContext", "a test asked for it")
            return None
        return IExecutionContext(self)

    def _complain(self, method: str, reason: str) -> None:
        self._runtime._logger.log(
            ILogger.Severity.ERROR, f"{method}: Error Code 3: API Usage Error ({reason})"
        )


class EngineInspector:
    """Says that every attention is fused, in the words of a TensorRT plan."""

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        layers = sum(name.startswith("past_key_") for name in self._engine._runs.inputs)
        marks = ["", *(f" [profile {index}]" for index in range(1, self._engine.num_optimization_profiles))]
        kernels = [
            {"Name": f"_gemm_mha_v2_{layer}{mark}", "Metadata": f"[ONNX Layer: layers.{layer}.attention]"}
            for layer in range(layers)
            for mark in marks
        ]
        return json.dumps({"Layers": kernels})


class IExecutionContext:
    """Shapes, addresses and scratch memory of one sequence of steps."""

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory: tuple[int, int] | None = None
        self._warm: dict[str, tuple[int, ...]] | None = None  # shapes of the last step

    def __del__(self) -> None:
        if self._profile is not None:
            self._engine._profiles_in_use.discard(self._profile)

    def set_device_memory(self, memory: int, size: int) -> None:
        if memory % ALIGNMENT or _Machine.gpu.room(memory) < size:
            _Machine.gpu.complain(f"set_device_memory: {size} bytes at {memory:#x} are no aligned allocation")
        self._memory = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """True, or RuntimeError: the bindings of every version raise where the library answers false."""
        if not self._choose_profile(profile_index):
            raise RuntimeError("Error in set optimization profile async.")
        return True

    def _choose_profile(self, profile_index: int) -> bool:
        engine = self._engine
        if self._refused("set_optimization_profile_async"):
            return False
        if not 0 <= profile_index < engine.num_optimization_profiles:
            return self._refuse("setOptimizationProfileAsync", f"no profile {profile_index}")
        if profile_index in engine._profiles_in_use - {self._profile}:
            return self._refuse("setOptimizationProfileAsync", f"profile {profile_index} is used elsewhere")
        engine._profiles_in_use.discard(self._profile if self._profile is not None else -1)
        engine._profiles_in_use.add(profile_index)
        self._profile = profile_index
        self._shapes = {}
        self._warm = None
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if self._refused("set_input_shape"):
            return False
        if self._profile is None or name not in self._engine._runs.inputs:
            return self._refuse("setInputShape", f"{name}: no such input, or no profile chosen")
        least, _, largest = self._engine._content.profiles[self._profile][name]
        sizes = tuple(map(int, shape))
        fits = len(sizes) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, sizes, largest, strict=True)
        )
        if not fits:
            return self._refuse("setInputShape", f"{name}: {sizes} is not in {least} … {largest}")
        self._shapes[name] = sizes
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if self._refused("set_tensor_address"):
            return False
        if name not in self._engine._names:
            return self._refuse("setTensorAddress", f"{name}: no such tensor")
        if memory % ALIGNMENT:
            return self._refuse(
                "setTensorAddress", f"{name}: {memory:#x} is not aligned to {ALIGNMENT} bytes"
            )
        self._addresses[name] = int(memory)
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        gpu = _Machine.gpu
        if self._refused("execute_async_v3"):
            return False
        if gpu.current_device is None:
            gpu.complain(f"execute_async_v3: {_THIS_THREAD_HAS_NO_CONTEXT}")
            return self._refuse("enqueueV3", "CUDA error 201")
        if stream_handle == 0:
            gpu.complain("execute_async_v3 on the default stream")
        wrong = self._wrong()
        if wrong is not None:
            return self._refuse("enqueueV3", wrong)
        if self._shapes != self._warm and gpu.is_capturing(stream_handle):
            return self._refuse("enqueueV3", "the first step of a shape cannot be captured")
        self._warm = dict(self._shapes)
        runs, step = self._engine._runs, self._step()
        failed = gpu.launch(stream_handle, lambda: runs.run(step, gpu))
        return failed == 0 or self._refuse("enqueueV3", f"CUDA error {failed}")

    def _step(self) -> Step:
        """The step as it is now: a later change of the context does not change it."""
        assert self._memory is not None
        assert self._profile is not None
        runs = self._engine._runs
        sizes = runs.sizes(self._shapes)
        bound = {
            name: Bound(address=self._addresses[name], shape=runs.concrete(name, sizes))
            for name in self._engine._names
        }
        scratch = Bound(address=self._memory[0], shape=(self._engine._content.activations[self._profile],))
        return Step(tensors=bound, scratch=scratch)

    def _wrong(self) -> str | None:
        engine = self._engine
        runs = engine._runs
        if self._profile is None:
            return "no optimization profile was chosen"
        if unset := [name for name in runs.inputs if name not in self._shapes]:
            return f"no shape was set for {unset}"
        if unbound := [name for name in engine._names if name not in self._addresses]:
            return f"no address was set for {unbound}"
        if self._memory is None or self._memory[1] < engine._content.activations[self._profile]:
            return "too little device memory was set"
        for output, source in runs.aliases.items():
            if self._addresses[output] != self._addresses[source]:
                return f"{output} is not where {source} is"
        if runs.sizes(self._shapes) is None:
            return f"shapes contradict each other: {self._shapes}"
        return None

    def _refused(self, method: str) -> bool:
        if not _Machine.faults.hits(method):
            return False
        self._refuse(method, "a test asked for it")
        return True

    def _refuse(self, method: str, reason: str) -> bool:
        self._engine._complain(f"IExecutionContext::{method}", reason)
        return False


def _made() -> ModuleType:
    made = ModuleType("tensorrt", "The tensorrt double.")
    made.__version__ = plans.VERSION  # type: ignore[attr-defined]
    for thing in (
        DataType, TensorIOMode, TensorLocation, ExecutionContextAllocationStrategy, ILogger, Runtime,
        ICudaEngine, IExecutionContext, EngineInspector, *BUILDER_TYPES,
    ):  # fmt: skip
        setattr(made, thing.__name__, thing)
    return made


_MODULE = _made()
