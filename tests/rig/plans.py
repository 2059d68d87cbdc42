"""Plans for the tensorrt double: a real plan header, then the contract graph, its weights and profile shapes.

header 32 bytes | u64 length of the description | description (JSON) | ONNX model | weights
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from engines.contract import Geometry
from engines.decoder import Decoder
from engines.graph_tensorrt import Precision, build_graph
from engines.onnx_emit import EmittedGraph

VERSION = "11.4.0.106"
_HEADER = struct.Struct("<4sIqqBBBB4s")
_LENGTH = struct.Struct("<Q")
_NUMBERS = [int(part) & 0xFF for part in VERSION.split(".")]

Shape = tuple[int, ...]
Shapes = Mapping[str, tuple[Shape, Shape, Shape]]
"""Input → its least, best and largest shape."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a plan holds. `positions` is S; `activations` the scratch bytes of each profile."""

    model: bytes
    weights: memoryview
    profiles: tuple[Shapes, ...]
    activations: tuple[int, ...]


def make_plan(
    decoder: Decoder, *, positions: int, precision: Precision = "float16", lanes: int, chunk: int,
    graph: EmittedGraph | None = None,
) -> bytes:  # fmt: skip
    """The plan of `decoder` (of `graph` instead, if given) with a prefill and a decode profile."""
    emitted = graph or build_graph(decoder, positions=positions, precision=precision)
    geometry = decoder.config.geometry
    shapes = [
        step_shapes(geometry, positions, rows=(1, 1, 1), tokens=(1, max(chunk // 2, 1), chunk)),
        step_shapes(geometry, positions, rows=(1, lanes, lanes), tokens=(1, 1, 1)),
    ]
    return pack(emitted, shapes)


def step_shapes(
    geometry: Geometry, positions: int, *, rows: tuple[int, int, int], tokens: tuple[int, int, int]
) -> Shapes:
    """Shapes of every input; windows of 256 (all positions if there are fewer) up to all positions."""
    least = min(256, positions)
    cache = (geometry.kv_heads, positions, geometry.head_dim)
    triple: dict[str, list[Shape]] = {
        "input_ids": list(zip(rows, tokens, strict=True)),
        "position_ids": list(zip(rows, tokens, strict=True)),
        "write_indices": [(row,) for row in rows],
        "kv_positions": [(least,), (positions,), (positions,)],
        "logit_indices": [(row, 1) for row in rows],
    }
    for layer in range(geometry.layers):
        for kind in ("key", "value"):
            triple[f"past_{kind}_{layer}"] = [(row, *cache) for row in rows]
    return {name: (shapes[0], shapes[1], shapes[2]) for name, shapes in triple.items()}


def pack(graph: EmittedGraph, profiles: list[Shapes]) -> bytes:
    """A plan of any graph and profiles."""
    return _packed(graph.model_bytes(), graph.weights_bytes().tobytes(), profiles)


def changed(plan: memoryview, change: Callable[[EmittedGraph], EmittedGraph]) -> bytes:
    """The same plan with a changed graph, the weights as they are."""
    content = unpack(plan)
    assert isinstance(content, Content), content
    graph = change(EmittedGraph(model=onnx.load_from_string(content.model), weights=()))
    return _packed(graph.model_bytes(), content.weights, content.profiles)


def _packed(model: bytes, weights: bytes | memoryview, profiles: Sequence[Shapes]) -> bytes:
    description = json.dumps(
        {"model": len(model), "profiles": [dict(shapes) for shapes in profiles]}
    ).encode()
    body = b"".join((_LENGTH.pack(len(description)), description, model, weights))
    return _HEADER.pack(b"ftrt", 0, 1, _HEADER.size + len(body), *_NUMBERS, b"\0\0\0\0") + body


def unpack(plan: memoryview) -> Content | str:
    """What a plan holds, or why it is none, in the words of TensorRT's log."""
    if len(plan) < _HEADER.size or bytes(plan[:4]) != b"ftrt":
        return "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed. Magic tag mismatch"
    _, _, _, size, *numbers, _ = _HEADER.unpack_from(plan)
    if numbers != _NUMBERS:
        return "The engine plan file is not compatible with this version of TensorRT"
    if size != len(plan):
        return f"Serialization assertion failed: {size} bytes expected, {len(plan)} given"
    try:
        start = _HEADER.size + _LENGTH.size
        (length,) = _LENGTH.unpack_from(plan, _HEADER.size)
        description = json.loads(bytes(plan[start : start + length]))
        model = bytes(plan[start + length : start + length + description["model"]])
        onnx.load_from_string(model)
    except Exception as error:
        return f"Deserialization failed: {type(error).__name__}"
    profiles = tuple(
        {name: tuple(tuple(shape) for shape in shapes) for name, shapes in profile.items()}
        for profile in description["profiles"]
    )
    return Content(
        model=model,
        weights=plan[start + length + len(model) :],
        profiles=profiles,
        activations=tuple(_activations(profile) for profile in profiles),
    )


def _activations(profile: Shapes) -> int:
    rows, tokens = profile["input_ids"][2]
    return 4096 * rows * tokens
