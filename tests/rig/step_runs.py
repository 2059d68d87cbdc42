"""Runs a step of the contract graph with ONNX Runtime on raw addresses, in place where tensors alias.

bfloat16 has no kernels on the CPU: such a graph runs in float32 on widened caches, and what it wrote is
rounded back.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from engines.onnx_emit import WEIGHTS_FILE, as_bfloat16
from tests.rig import plans
from tests.rig.driver import StandIn

Shape = tuple[int | str, ...]

_KINDS: dict[int, tuple[str, Any]] = {  # numpy has no bfloat16
    TensorProto.INT64: ("int64", np.dtype(np.int64)),
    TensorProto.FLOAT: ("float32", np.dtype(np.float32)),
    TensorProto.FLOAT16: ("float16", np.dtype(np.float16)),
    TensorProto.BFLOAT16: ("bfloat16", np.dtype(np.uint16)),
}
SCRATCH_PATTERN = 0xA5


@dataclass(frozen=True, slots=True)
class Tensor:
    """A graph's input or output; sizes that a step decides are names."""

    kind: str
    dtype: np.dtype[Any]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Bound:
    """A tensor's place and sizes in one step."""

    address: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that a step depends on, but the bytes."""

    tensors: Mapping[str, Bound]
    scratch: Bound


class StepRuns:
    """An ONNX Runtime session over one plan's graph."""

    def __init__(self, content: plans.Content) -> None:
        model = onnx.load_from_string(content.model)
        self.inputs = {value.name: _tensor(value) for value in model.graph.input}
        self.outputs = {value.name: _tensor(value) for value in model.graph.output}
        self.aliases = {
            node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "TensorScatter"
        }
        weights = content.weights
        self._widened = any(tensor.kind == "bfloat16" for tensor in self.inputs.values())
        if self._widened:
            model, weights = _widen(model, weights)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if len(weights):
            data = bytes(weights)
            options.add_external_initializers_from_files_in_memory([WEIGHTS_FILE], [data], [len(data)])
        self._session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def tensor(self, name: str) -> Tensor:
        return self.inputs[name] if name in self.inputs else self.outputs[name]

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int] | None:
        """The value of every named size; None if two tensors disagree."""
        found: dict[str, int] = {}
        for name, shape in shapes.items():
            for label, size in zip(self.inputs[name].shape, shape, strict=True):
                if isinstance(label, str) and found.setdefault(label, size) != size:
                    return None
        return found

    def concrete(self, name: str, sizes: Mapping[str, int] | None) -> tuple[int, ...]:
        assert sizes is not None
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.tensor(name).shape)

    def run(self, step: Step, gpu: StandIn) -> None:
        """The kernel. Raises where a GPU would fault or write elsewhere."""
        self._check(step, gpu)
        ctypes.memset(step.scratch.address, SCRATCH_PATTERN, step.scratch.shape[0])
        if self._widened:
            self._run_widened(step)
        else:
            self._run_in_place(step)

    def _check(self, step: Step, gpu: StandIn) -> None:
        for name, bound in step.tensors.items():
            need = int(np.prod(bound.shape)) * self.tensor(name).dtype.itemsize
            assert gpu.room(bound.address) >= need, f"{name}: {need} bytes at {bound.address:#x}"
            apart = bound.address + need <= step.scratch.address or bound.address >= (
                step.scratch.address + step.scratch.shape[0]
            )
            assert apart, f"{name} lies in the activations"
        assert gpu.room(step.scratch.address) >= step.scratch.shape[0], "activations were freed"
        written, ids = self._array(step, "write_indices"), self._array(step, "input_ids")
        positions = step.tensors["past_key_0"].shape[2]
        last = written + ids.shape[1]
        assert 0 <= written.min() <= last.max() <= positions, (
            f"writes up to {last.max()} of {positions} positions"
        )

    def _array(self, step: Step, name: str) -> npt.NDArray[Any]:
        bound, dtype = step.tensors[name], self.tensor(name).dtype
        raw = (ctypes.c_uint8 * (int(np.prod(bound.shape)) * dtype.itemsize)).from_address(bound.address)
        return np.frombuffer(raw, dtype).reshape(bound.shape)

    def _run_in_place(self, step: Step) -> None:
        binding = self._session.io_binding()
        for name in self.inputs:
            bound = step.tensors[name]
            binding.bind_input(name, "cpu", 0, self.tensor(name).dtype, bound.shape, bound.address)
        for name in self.outputs:
            bound = step.tensors[name]
            binding.bind_output(name, "cpu", 0, self.tensor(name).dtype, bound.shape, bound.address)
        self._session.run_with_iobinding(binding)

    def _run_widened(self, step: Step) -> None:
        names = list(self.outputs)
        feed = {name: _wide(self._array(step, name), tensor) for name, tensor in self.inputs.items()}
        for name, result in zip(names, self._session.run(names, feed), strict=True):
            narrow = as_bfloat16(result) if self.outputs[name].kind == "bfloat16" else result
            np.copyto(self._array(step, name), narrow)


def _wide(array: npt.NDArray[Any], tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.kind != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def _tensor(value: onnx.ValueInfoProto) -> Tensor:
    found = value.type.tensor_type
    kind, dtype = _KINDS[found.elem_type]
    sizes = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in found.shape.dim)
    return Tensor(kind=kind, dtype=dtype, shape=tuple(sizes))


def _widen(model: onnx.ModelProto, weights: memoryview) -> tuple[onnx.ModelProto, memoryview]:
    """The same graph in float32, its weights inside the model."""
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        stored = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_type != TensorProto.BFLOAT16:
            assert not stored, f"{tensor.name}: an external weight that is not bfloat16"
            continue
        if stored:
            start = int(stored.get("offset", 0))
            raw = bytes(weights[start : start + int(stored["length"])])
        else:
            raw = tensor.raw_data
        narrow = np.frombuffer(raw, np.uint16).reshape(tuple(tensor.dims))
        tensor.CopyFrom(
            numpy_helper.from_array((narrow.astype(np.uint32) << 16).view(np.float32), tensor.name)
        )
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.BFLOAT16:
                attribute.CopyFrom(helper.make_attribute("to", TensorProto.FLOAT))
    return model, memoryview(b"")
