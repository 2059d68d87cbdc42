"""Emits ONNX graphs node by node, with large weights kept outside the model file and made only when written.

A `GraphEmitter` collects inputs, nodes, small constants (inside the model) and weights (in one external
file, `WEIGHTS_FILE`, each at an offset that is a multiple of `ALIGNMENT`). `finish` hands over an
`EmittedGraph`: the model with its external references filled in, and the weights in file order. Weights are
lazy, so that building a large model never holds more than one converted tensor.

Invariants
- Every weight's bytes are exactly what its element type and shape say; a mismatch is our bug and asserts.
- Every graph input is read by a node: an unread one is how a wrong mask or a forgotten cache hides.
- Equal calls in equal order give equal bytes: nothing depends on time, hashing or addresses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTS_FILE = "weights.bin"
ALIGNMENT = 4096  # offsets of external tensors: a page, so that a mapped file gives aligned tensors

Array: TypeAlias = npt.NDArray[Any]

_BITS: dict[int, int] = {
    TensorProto.FLOAT: 32,
    TensorProto.FLOAT16: 16,
    TensorProto.BFLOAT16: 16,
    TensorProto.INT64: 64,
    TensorProto.INT32: 32,
    TensorProto.INT8: 8,
    TensorProto.UINT8: 8,
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
}


@dataclass(frozen=True, slots=True)
class Weight:
    """One external tensor: where it lies in the weights file and how to make its bytes."""

    name: str
    element: int  # onnx.TensorProto data type
    shape: tuple[int, ...]
    offset: int
    length: int
    make: Callable[[], Array]

    def array(self) -> Array:
        """The tensor's bytes, C-contiguous; bfloat16 is carried as uint16, 4-bit types as packed bytes."""
        made = np.ascontiguousarray(self.make())
        assert made.nbytes == self.length, f"{self.name}: {made.nbytes} bytes made, {self.length} expected"
        return made


@dataclass(frozen=True, slots=True)
class EmittedGraph:
    """A model whose weights lie in one external file. `weights` is in the order of that file."""

    model: onnx.ModelProto
    weights: tuple[Weight, ...]

    def model_bytes(self) -> bytes:
        """The serialised model, without the external weights."""
        return bytes(self.model.SerializeToString(deterministic=True))

    def write_weights(self, file: BinaryIO) -> int:
        """Write the weights file, one tensor in memory at a time; returns its size in bytes."""
        position = 0
        for weight in self.weights:
            file.write(b"\0" * (weight.offset - position))
            file.write(weight.array().reshape(-1).view(np.uint8).data)
            position = weight.offset + weight.length
        return position

    def weights_bytes(self) -> npt.NDArray[np.uint8]:
        """The whole weights file in memory; for graphs that are run where they are built."""
        size = max((weight.offset + weight.length for weight in self.weights), default=0)
        out = np.zeros(size, dtype=np.uint8)
        for weight in self.weights:
            out[weight.offset : weight.offset + weight.length] = weight.array().reshape(-1).view(np.uint8)
        return out


class GraphEmitter:
    """Builds one ONNX graph. Node and tensor names are unique; a repeated name is our bug and asserts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._weights: dict[str, Weight] = {}
        self._aliases: list[Weight] = []
        self._end_of_weights = 0
        self._names: set[str] = set()

    def input(self, name: str, element: int, shape: Sequence[int | str]) -> str:
        """Declare a graph input; string dimensions are symbolic."""
        self._inputs.append(helper.make_tensor_value_info(self._claim(name), element, list(shape)))
        return name

    def output(self, name: str, element: int, shape: Sequence[int | str]) -> None:
        """Declare that the tensor `name`, made by a node, is a graph output."""
        self._outputs.append(helper.make_tensor_value_info(name, element, list(shape)))

    def constant(self, name: str, array: Array) -> str:
        """A small tensor inside the model. The same name with the same value may come again and is shared."""
        return self._keep(numpy_helper.from_array(np.asarray(array), name))

    def weight(self, name: str, element: int, shape: Sequence[int], make: Callable[[], Array]) -> str:
        """An external tensor; `make` is called whenever the weights are written. A known name is shared."""
        known = self._weights.get(name)
        if known is not None:
            assert (known.element, known.shape) == (element, tuple(shape)), f"weight {name} in two forms"
            return name
        length = (int(np.prod(shape, dtype=np.int64)) * _BITS[element] + 7) // 8
        offset = -(-self._end_of_weights // ALIGNMENT) * ALIGNMENT
        self._weights[self._claim(name)] = Weight(name, element, tuple(shape), offset, length, make)
        self._end_of_weights = offset + length
        return name

    def alias(self, name: str, of: str, shape: Sequence[int]) -> str:
        """A second external tensor over the bytes of the weight `of`, in another shape of the same size."""
        weight = self._weights[of]
        assert int(np.prod(shape)) == int(np.prod(weight.shape)), f"{name}: {shape} is not {of} reshaped"
        self._aliases.append(replace(weight, name=self._claim(name), shape=tuple(shape)))
        return name

    def node(self, op: str, inputs: Sequence[str], out: str, *, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output named `out`; absent optional inputs are ""."""
        return self.nodes(op, inputs, (out,), domain=domain, **attributes)[0]

    def nodes(
        self, op: str, inputs: Sequence[str], outs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """Add a node with several outputs ("" skips an optional one), named after the first of them."""
        claimed = [self._claim(out) for out in outs if out]
        name = claimed[0]
        self._nodes.append(
            helper.make_node(op, list(inputs), list(outs), name=name, domain=domain, **attributes)
        )
        return tuple(outs)

    def finish(self, *, opsets: dict[str, int], ir_version: int) -> EmittedGraph:
        """Close the graph, with `opsets` by domain ("" is the standard one)."""
        read = {name for node in self._nodes for name in node.input}
        unread = [value.name for value in self._inputs if value.name not in read]
        assert not unread, f"graph {self._name}: inputs {unread} are read by no node"
        external = [*self._weights.values(), *self._aliases]
        tensors = [*self._constants.values(), *(_reference(weight) for weight in external)]
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, initializer=tensors)
        imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        model = helper.make_model(
            graph, opset_imports=imports, ir_version=ir_version, producer_name="tensorcache"
        )
        return EmittedGraph(model=model, weights=tuple(self._weights.values()))

    def _keep(self, tensor: onnx.TensorProto) -> str:
        known = self._constants.get(tensor.name)
        if known is None:
            self._constants[self._claim(tensor.name)] = tensor
        assert known is None or known == tensor, f"constant {tensor.name} with two values"
        return str(tensor.name)

    def _claim(self, name: str) -> str:
        assert name not in self._names, f"tensor name {name!r} used twice"
        self._names.add(name)
        return name


def _reference(weight: Weight) -> onnx.TensorProto:
    tensor = TensorProto(name=weight.name, data_type=weight.element, dims=weight.shape)
    tensor.data_location = TensorProto.EXTERNAL
    where = {"location": WEIGHTS_FILE, "offset": str(weight.offset), "length": str(weight.length)}
    for key, value in where.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def as_bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16, nearest even, carried as uint16 because numpy has no such type."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16)
