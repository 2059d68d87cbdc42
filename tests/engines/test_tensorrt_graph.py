"""The `tensorrt` graph as TensorRT-RTX's own parser and builder see it, on a machine without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import tensorrt_rtx as trt

from engines.decoder import Decoder
from engines.errors import BuildError
from engines.gguf import demo_gguf, load_gguf
from engines.graph_tensorrt import Precision, build_graph
from engines.huggingface import load_huggingface
from engines.int4 import dequantise_int4, pack_int4, quantise_int4
from engines.onnx_emit import EmittedGraph
from engines.tensorrt_network import inspect_network, parse_network
from tests.engines.tiny_models import save_tiny

POSITIONS = 2080  # max_seq_len 2,048, a scratch position, whole blocks of 32
CHUNK = 512
LANES = 8


class Messages(trt.ILogger):  # type: ignore[misc]  # the module has no types
    """Keeps what TensorRT says at warning level and above."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.Severity.WARNING:
            self.kept.append(message)


class Parsed:
    """A parsed network together with its builder."""

    def __init__(self, graph: EmittedGraph) -> None:
        self.messages = Messages()
        self.builder = trt.Builder(self.messages)
        weights = {weight.name: weight.array().reshape(-1).view(np.uint8) for weight in graph.weights}
        self._parsed = parse_network(trt, self.builder, self.messages, graph=graph, weights=weights)
        self.network = self._parsed.network

    def attentions(self) -> list[Any]:
        found = []
        for layer in (self.network.get_layer(i) for i in range(self.network.num_layers)):
            if layer.type == trt.LayerType.ATTENTION_INPUT:
                layer.__class__ = trt.IAttentionInputLayer
                found.append(layer.attention)
        return found


def inspect(parsed: Parsed, decoder: Decoder) -> None:
    """What must hold of every network before anyone builds an engine from it."""
    inspect_network(trt, parsed.network, decoder.config.geometry)
    assert all(attention.decomposable for attention in parsed.attentions())


@pytest.fixture(scope="module")
def smollm2() -> Decoder:
    return load_gguf(demo_gguf())


@pytest.fixture(scope="module")
def two_layers(smollm2: Decoder) -> Decoder:
    """The first two layers of the real model, and 1,000 of its tokens."""
    geometry = msgspec.structs.replace(smollm2.config.geometry, layers=2, vocab_size=1000)
    weights = {name: array for name, array in smollm2.weights.items() if not name.startswith("layers.")}
    for name in smollm2.weights:
        if name.startswith(("layers.0.", "layers.1.")):
            weights[name] = smollm2.weights[name]
    weights["embed"] = weights["embed"][:1000]
    config = msgspec.structs.replace(smollm2.config, geometry=geometry)
    return replace(smollm2, config=config, weights=weights)


def profile(parsed: Parsed, *, batch: int, tokens: int) -> Any:
    """Shapes from one row, token and the smallest window up to `batch`, `tokens` and all positions."""
    made = parsed.builder.create_optimization_profile()
    for i in range(parsed.network.num_inputs):
        tensor = parsed.network.get_input(i)
        match tensor.name:
            case "kv_positions":
                low, high = [256], [2048]
            case "input_ids" | "position_ids":
                low, high = [1, 1], [batch, tokens]
            case "logit_indices":
                low, high = [1, 1], [batch, 1]
            case _:  # one row per lane, every other size static
                low, high = [1, *tensor.shape[1:]], [batch, *tensor.shape[1:]]
        made.set_shape(tensor.name, low, high, high)
    return made


def build(parsed: Parsed) -> bytes:
    """A plan for compute capability 8.0 with a prefill and a decode profile."""
    config = parsed.builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    config.add_optimization_profile(profile(parsed, batch=1, tokens=CHUNK))
    config.add_optimization_profile(profile(parsed, batch=LANES, tokens=1))
    plan = parsed.builder.build_serialized_network(parsed.network, config)
    assert plan is not None, parsed.messages.kept
    return bytes(plan)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_real_model_builds_for_two_profiles(smollm2: Decoder, precision: Precision) -> None:
    parsed = Parsed(build_graph(smollm2, positions=POSITIONS, precision=precision))
    inspect(parsed, smollm2)
    plan = build(parsed)
    weights = sum(array.size for array in smollm2.weights.values()) * 2
    assert len(plan) > weights, "a plan smaller than its weights"
    assert plan[:4] == b"vtrt"


@pytest.mark.parametrize("precision", ["float32", "int4"])
def test_other_precisions_build(two_layers: Decoder, precision: Precision) -> None:
    parsed = Parsed(build_graph(two_layers, positions=POSITIONS, precision=precision))
    inspect(parsed, two_layers)
    assert build(parsed)[:4] == b"vtrt"


@pytest.mark.parametrize("name", ["llama-no-gqa-bias", "mistral-head-dim", "qwen2", "qwen3-bias"])
def test_other_architectures_build(tmp_path: Path, name: str) -> None:
    decoder = load_huggingface(save_tiny(name, tmp_path), max_seq_len=64)
    parsed = Parsed(build_graph(decoder, positions=POSITIONS, precision="float16"))
    inspect(parsed, decoder)
    assert build(parsed)[:4] == b"vtrt"


def causal_without_mask(node: onnx.NodeProto) -> None:
    node.input[3] = ""
    next(attribute for attribute in node.attribute if attribute.name == "is_causal").i = 1


def no_mask(node: onnx.NodeProto) -> None:
    node.input[3] = ""


def valid_lengths(node: onnx.NodeProto) -> None:
    node.input.extend(["", "", "valid_lengths"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (causal_without_mask, "an attention with an implicit causal mask"),
        (no_mask, "an attention without a mask"),
        (valid_lengths, "inputs no layer reads: valid_lengths"),
    ],
)
def test_the_inspection_can_fail(
    two_layers: Decoder, change: Callable[[onnx.NodeProto], None], complaint: str
) -> None:
    graph = build_graph(two_layers, positions=POSITIONS, precision="float16")
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    for node in model.graph.node:
        if node.op_type == "Attention":
            change(node)
    if change is valid_lengths:
        lengths = onnx.helper.make_tensor_value_info("valid_lengths", onnx.TensorProto.INT64, ["batch"])
        model.graph.input.append(lengths)
    with pytest.raises(BuildError, match=complaint):
        inspect(Parsed(EmittedGraph(model=model, weights=graph.weights)), two_layers)


def test_a_lane_must_be_aligned_in_its_cache(two_layers: Decoder) -> None:
    tight = msgspec.structs.replace(two_layers.config.geometry, kv_heads=1, head_dim=2)
    decoder = replace(two_layers, config=msgspec.structs.replace(two_layers.config, geometry=tight))
    with pytest.raises(BuildError, match=r"positions: 2081 makes a lane of 8324 bytes .* multiples of 256"):
        build_graph(decoder, positions=2081, precision="float16")


def test_int4_weights_come_back_near_what_they_were(two_layers: Decoder) -> None:
    errors: dict[str, float] = {}
    graph = build_graph(two_layers, positions=POSITIONS, precision="int4", weight_errors=errors)
    assert errors == {}, "weights are rounded when they are written"
    graph.weights_bytes()
    assert set(errors) == {
        f"layers.{i}.{kind}" for i in (0, 1) for kind in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert max(errors.values()) < 0.12
    exact = np.arange(-7, 8, dtype=np.float32).repeat(5)[:64].reshape(32, 2) * 0.25
    assert np.array_equal(dequantise_int4(*quantise_int4(exact)), exact)
    packed = pack_int4(np.array([[-8, 7], [1, -1]], dtype=np.int8))
    assert packed.tolist() == [0x78, 0xF1]


def test_float16_refuses_a_weight_it_cannot_hold(two_layers: Decoder) -> None:
    wide = {**two_layers.weights, "norm": np.full(two_layers.config.geometry.hidden, 1e5, dtype=np.float32)}
    graph = build_graph(replace(two_layers, weights=wide), positions=POSITIONS, precision="float16")
    with pytest.raises(BuildError, match="precision: float16 cannot hold a weight of 100000"):
        graph.weights_bytes()
