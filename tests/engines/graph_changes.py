"""Graphs changed after they were built: mutants that checks must catch, and graphs that fail on cue."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from engines.manifest import MANIFEST, parse_manifest
from engines.options import EngineOptions
from engines.ort import OrtEngine

Change = Callable[[onnx.GraphProto], None]


def changed_engine(release: Path, change: Change, *, lanes: int = 4) -> OrtEngine:
    """An engine over the release's weights with a changed graph."""
    manifest = parse_manifest((release / MANIFEST).read_bytes())
    files = {name: memoryview((release / name).read_bytes()) for name in manifest.files}
    model = onnx.load_from_string(bytes(files[manifest.graph]))
    change(model.graph)
    files[manifest.graph] = memoryview(model.SerializeToString())
    return OrtEngine(manifest, files, options=EngineOptions(threads=2, lanes=lanes), digest="changed")


def upper_left_mask(graph: onnx.GraphProto) -> None:
    """Query row i of a step sees keys 0 … i, as if nothing had been cached before the step."""
    _before(graph, "GroupQueryAttention", [
        _constant("m.zero", np.array(0, dtype=np.int64)),
        _constant("m.one", np.array(1, dtype=np.int64)),
        _constant("m.hidden", np.array(-1e9, dtype=np.float32)),
        _constant("m.seen", np.array(0, dtype=np.float32)),
        _constant("m.column", np.array([-1, 1], dtype=np.int64)),
        _constant("m.four", np.array([0, 1], dtype=np.int64)),
        helper.make_node("Cast", ["longest"], ["m.keys"], to=TensorProto.INT64),
        helper.make_node("Range", ["m.zero", "m.keys", "m.one"], ["m.key"]),
        helper.make_node("Reshape", ["ramp", "m.column"], ["m.row"]),
        helper.make_node("Greater", ["m.key", "m.row"], ["m.later"]),
        helper.make_node("Where", ["m.later", "m.hidden", "m.seen"], ["m.mask"]),
        helper.make_node("Unsqueeze", ["m.mask", "m.four"], ["m.bias"]),
    ])  # fmt: skip
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[10] = "m.bias"


def ignored_cache(graph: onnx.GraphProto) -> None:
    """The keys of earlier steps are read as zeros."""
    for layer in range(_layers(graph)):
        name = f"past_key_{layer}"
        attention = next(node for node in graph.node if name in node.input)
        _before(graph, "GroupQueryAttention", [
            _constant(f"m.nothing.{layer}", np.array(0, dtype=np.float32)),
            helper.make_node("Mul", [name, f"m.nothing.{layer}"], [f"m.forgotten.{layer}"]),
        ])  # fmt: skip
        attention.input[3] = f"m.forgotten.{layer}"


def idle_rows_write_at_zero(graph: onnx.GraphProto) -> None:
    """A row without queries is given one, at position 0."""
    graph.node.insert(0, helper.make_node("Cast", ["m.active"], ["m.active.int64"], to=TensorProto.INT64))
    graph.node.insert(1, helper.make_node("Mul", ["write_indices", "m.active.int64"], ["m.write"]))
    graph.node.insert(2, helper.make_node("Max", ["query_lens", "m.single"], ["m.lens"]))
    for node in list(graph.node)[3:]:
        for index, name in enumerate(node.input):
            if name in ("write_indices", "query_lens"):
                node.input[index] = "m.write" if name == "write_indices" else "m.lens"
    graph.node.insert(0, helper.make_node("Greater", ["query_lens", "m.none"], ["m.active"]))
    graph.node.insert(0, _constant("m.none", np.array(0, dtype=np.int32)))
    graph.node.insert(0, _constant("m.single", np.array(1, dtype=np.int32)))


def queries_not_doubled(graph: onnx.GraphProto) -> None:
    """Odd numbers of queries reach the attention kernel as they are."""
    for node in graph.node:
        if node.op_type == "Mod":
            node.input[1] = "m.unit" if node.input[0] == "tokens" else "m.unit.int32"
    graph.node.insert(0, _constant("m.unit", np.array(1, dtype=np.int64)))
    graph.node.insert(0, _constant("m.unit.int32", np.array(1, dtype=np.int32)))


def fails_on(token: int) -> Change:
    """The runtime reports an error in any step that holds `token`, the highest of the vocabulary."""

    def change(graph: onnx.GraphProto) -> None:
        _before(graph, "SimplifiedLayerNormalization", [
            _constant("m.table", np.zeros((token, 1), dtype=np.float32)),
            helper.make_node("Gather", ["m.table", "input_ids"], ["m.nothing"], axis=0),
            helper.make_node("Add", ["embedded", "m.nothing"], ["m.embedded"]),
        ])  # fmt: skip
        for node in graph.node:
            if node.op_type in ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"):
                for index, name in enumerate(node.input):
                    if name == "embedded":
                        node.input[index] = "m.embedded"

    return change


def renamed_input(graph: onnx.GraphProto) -> None:
    """`write_indices` is called something else."""
    _rename_input(graph, "write_indices", "write_index")


def wider_cache(graph: onnx.GraphProto) -> None:
    """The cache of layer 1 claims one head more."""
    value = next(value for value in graph.input if value.name == "past_key_1")
    value.type.tensor_type.shape.dim[1].dim_value += 1


def _rename_input(graph: onnx.GraphProto, old: str, new: str) -> None:
    next(value for value in graph.input if value.name == old).name = new
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new


def _constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value, name))


def _before(graph: onnx.GraphProto, op: str, nodes: list[onnx.NodeProto]) -> None:
    """Insert nodes before the first of a kind, so that the graph stays in order."""
    at = next(index for index, node in enumerate(graph.node) if node.op_type == op)
    for node in reversed(nodes):
        graph.node.insert(at, node)


def _layers(graph: onnx.GraphProto) -> int:
    return sum(value.name.startswith("past_key_") for value in graph.input)
