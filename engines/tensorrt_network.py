"""Parses a decoder's graph into a TensorRT network and refuses one that TensorRT would run wrongly.

TensorRT's parser is lenient where it matters: it leaves inputs unread that it does not know, and takes a
causal flag as an upper-left triangle. Such a network builds, runs, and answers wrongly. So every network is
inspected before an engine is built from it.

`trt` is the TensorRT module, 10.15 … 11.x; TensorRT-RTX has the same builder and parser and needs no GPU for
them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.contract import Geometry
from engines.errors import BuildError
from engines.onnx_emit import EmittedGraph

Bytes = npt.NDArray[np.uint8]

STEP_INPUTS = ("input_ids", "position_ids", "write_indices", "kv_positions", "logit_indices")


@dataclass(frozen=True, slots=True)
class ParsedNetwork:
    """A network, and what must live as long as it: its parser, and the weights it points into."""

    network: Any
    parser: Any
    weights: Mapping[str, Bytes]


def parse_network(
    trt: Any, builder: Any, logger: Any, *, graph: EmittedGraph, weights: Mapping[str, Bytes]
) -> ParsedNetwork:
    """The strongly typed network of `graph`; `weights` are its external tensors, used where they lie.

    They are handed over by address: no protobuf limit, and no second copy of them in memory. BuildError with
    the parser's reasons.
    """
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    parsed = bool(parser.load_model_proto(graph.model_bytes()))
    for weight in graph.weights:
        data = weights[weight.name]
        parsed = parsed and bool(parser.load_initializer(weight.name, data.ctypes.data, data.nbytes))
    if not parsed or not parser.parse_model_proto():
        reasons = [_reason(parser.get_error(index)) for index in range(parser.num_errors)]
        raise BuildError(f"network: TensorRT {trt.__version__} does not parse it: {_one_line(reasons)}")
    return ParsedNetwork(network, parser, weights)


def inspect_network(trt: Any, network: Any, geometry: Geometry) -> None:
    """Refuse with BuildError a network that does not mean what the graph says; let its attentions decompose.

    Every attention has an explicit mask and no causal kind of its own, every input is read by a layer, every
    cache is updated in place. An attention that no fused kernel takes may then run as several, instead of not
    at all.
    """
    layers = geometry.layers
    caches = sum(layer.type == trt.LayerType.KV_CACHE_UPDATE for layer in _layers(network))
    _require("updates of a KV cache", 2 * layers, caches)
    attentions = list(_attentions(trt, network))
    _require("attentions", layers, len(attentions))
    for attention in attentions:
        if _is_causal(trt, attention):
            raise BuildError(f"network: {attention.name} is an attention with an implicit causal mask")
        if attention.mask is None:
            raise BuildError(f"network: {attention.name} is an attention without a mask")
        attention.decomposable = True
    _check_inputs(network, layers)


def _check_inputs(network: Any, layers: int) -> None:
    inputs = {network.get_input(index).name for index in range(network.num_inputs)}
    tensors = (layer.get_input(index) for layer in _layers(network) for index in range(layer.num_inputs))
    unread = inputs - {tensor.name for tensor in tensors if tensor is not None}
    if unread:
        raise BuildError(f"network: inputs no layer reads: {', '.join(sorted(unread))}")
    caches = {f"past_{kind}_{layer}" for kind in ("key", "value") for layer in range(layers)}
    if inputs != caches | {*STEP_INPUTS}:
        other = inputs ^ (caches | {*STEP_INPUTS})
        raise BuildError(f"network: inputs are not those of the contract: {', '.join(sorted(other))}")


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))


def _attentions(trt: Any, network: Any) -> Iterator[Any]:
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings hand out every layer as an ILayer
            yield layer.attention


def _is_causal(trt: Any, attention: Any) -> bool:
    """TensorRT 10 has a flag where 11 has kinds."""
    kinds = getattr(trt, "CausalMaskKind", None)
    return bool(attention.causal) if kinds is None else attention.causal_kind != kinds.NONE


def _network_flags(trt: Any) -> int:
    """Precision as the graph says it: a flag of TensorRT 10, and what 11 always does, flag or not."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _require(what: str, expected: int, found: int) -> None:
    if found != expected:
        raise BuildError(f"network: {found} {what}, expected {expected}")


def _reason(error: Any) -> str:
    return f"{error.node_operator()} {error.node_name()}: {error.desc()}"


def _one_line(reasons: list[str]) -> str:
    return " ".join("; ".join(reasons).split()) or "it gives no reason"
