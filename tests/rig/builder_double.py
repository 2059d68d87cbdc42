"""The builder half of the tensorrt double: parses the contract graph and serialises it as a plan of plans.py.

What TensorRT's own parser makes of a graph is tested with TensorRT-RTX (tests/engines); here a layer is a
node.
"""

import ctypes
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from engines.onnx_emit import EmittedGraph, Weight
from tests.rig import plans


class ProfilingVerbosity(enum.Enum):
    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class HardwareCompatibilityLevel(enum.Enum):
    NONE = 0
    AMPERE_PLUS = 1
    SAME_COMPUTE_CAPABILITY = 2


class LayerInformationFormat(enum.Enum):
    ONELINE = 0
    JSON = 1


class NetworkDefinitionCreationFlag(enum.Enum):
    STRONGLY_TYPED = 1

    def __int__(self) -> int:
        return self.value


class CausalMaskKind(enum.Enum):
    NONE = 0
    UPPER_LEFT = 1


class LayerType(enum.Enum):
    ELEMENTWISE = 0
    ATTENTION_INPUT = 1
    KV_CACHE_UPDATE = 2


class IProgressMonitor:
    """To be subclassed with three methods of one's own."""

    def __init__(self) -> None:
        pass

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        raise NotImplementedError

    def step_complete(self, phase_name: str, step: int) -> bool:
        raise NotImplementedError

    def phase_finish(self, phase_name: str) -> None:
        raise NotImplementedError


class ITensor:
    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.shape = shape


class IAttention:
    def __init__(self, node: onnx.NodeProto) -> None:
        self.name = node.name
        self.mask = ITensor(node.input[3], ()) if len(node.input) > 3 and node.input[3] else None
        causal = any(attribute.name == "is_causal" and attribute.i for attribute in node.attribute)
        self.causal_kind = CausalMaskKind.UPPER_LEFT if causal else CausalMaskKind.NONE
        self.decomposable = False


class ILayer:
    """A node. The bindings hand out every layer as an ILayer; its class is assigned."""

    def __init__(self, node: onnx.NodeProto, attention: IAttention | None) -> None:
        self.name = node.name
        self._inputs = [ITensor(name, ()) if name else None for name in node.input]
        self._attention = attention
        kinds = {"TensorScatter": LayerType.KV_CACHE_UPDATE, "Attention": LayerType.ATTENTION_INPUT}
        self.type = kinds.get(node.op_type, LayerType.ELEMENTWISE)

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def get_input(self, index: int) -> ITensor | None:
        return self._inputs[index]


class IAttentionInputLayer(ILayer):
    @property
    def attention(self) -> IAttention | None:
        return self._attention


class INetworkDefinition:
    def __init__(self) -> None:
        self._graph: EmittedGraph | None = None
        self._inputs: list[ITensor] = []
        self._layers: list[ILayer] = []
        self._attentions: list[IAttention] = []

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def get_input(self, index: int) -> ITensor:
        return self._inputs[index]

    def get_layer(self, index: int) -> ILayer:
        return self._layers[index]

    def _take(self, model: onnx.ModelProto, weights: tuple[Weight, ...]) -> None:
        self._graph = EmittedGraph(model=model, weights=weights)
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            sizes = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)
            self._inputs.append(ITensor(value.name, sizes))
        for node in model.graph.node:
            attention = IAttention(node) if node.op_type == "Attention" else None
            self._layers.append(ILayer(node, attention))
            if attention is not None:
                self._attentions.append(attention)


class ParserError:
    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name

    def desc(self) -> str:
        return self._text

    def node_name(self) -> str:
        return self._name

    def node_operator(self) -> str:
        return "Initializer"


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: Any) -> None:
        self._network = network
        self._logger = logger
        self._model: onnx.ModelProto | None = None
        self._weights: dict[str, bytes] = {}
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def load_model_proto(self, model: Any) -> bool:
        self._model = onnx.load_from_string(bytes(model))
        return True

    def load_initializer(self, name: str, data: int, size: int) -> bool:
        self._weights[name] = ctypes.string_at(data, size)
        return True

    def parse_model_proto(self) -> bool:
        assert self._model is not None, "no model was loaded"
        weights = []
        for tensor in self._model.graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if not place:
                continue
            if tensor.name not in self._weights:
                self._errors.append(ParserError("no data", tensor.name))
                return False
            weights.append(_weight(tensor, place, self._weights[tensor.name]))
        self._network._take(self._model, tuple(weights))
        return True


class IOptimizationProfile:
    def __init__(self) -> None:
        self._shapes: dict[str, tuple[plans.Shape, plans.Shape, plans.Shape]] = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        """The bindings of every version raise where the library answers false."""
        least, best, most = (tuple(map(int, shape)) for shape in (min, opt, max))
        for low, high, which in ((least, best, "opt"), (best, most, "max")):
            if len(low) != len(high) or any(a > b for a, b in zip(low, high, strict=True)):
                raise RuntimeError(f"Shape provided for {which} is inconsistent with other shapes.")
        self._shapes[input] = (least, best, most)


class ITimingCache:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> bytes:
        return self._data or b"timings"


class IBuilderConfig:
    def __init__(self) -> None:
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self.progress_monitor: IProgressMonitor | None = None
        self._profiles: list[IOptimizationProfile] = []
        self._timing_cache: ITimingCache | None = None

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        pass

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._timing_cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._timing_cache


class Builder:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes:
        assert network._graph is not None, "a network that nothing was parsed into"
        assert all(attention.decomposable for attention in network._attentions), (
            "an attention that may not decompose"
        )
        if config.progress_monitor is not None:
            config.progress_monitor.phase_start("Building", None, 1)
            config.progress_monitor.step_complete("Building", 0)
            config.progress_monitor.phase_finish("Building")
        return plans.pack(network._graph, [profile._shapes for profile in config._profiles])


def _weight(tensor: onnx.TensorProto, place: dict[str, str], data: bytes) -> Weight:
    return Weight(
        name=tensor.name,
        element=tensor.data_type,
        shape=tuple(tensor.dims),
        offset=int(place.get("offset", 0)),
        length=int(place["length"]),
        make=lambda: np.frombuffer(data, np.uint8),
    )


BUILDER_TYPES = (
    ProfilingVerbosity, MemoryPoolType, HardwareCompatibilityLevel, LayerInformationFormat, CausalMaskKind,
    NetworkDefinitionCreationFlag, LayerType, IProgressMonitor, ITensor, IAttention, ILayer,
    IAttentionInputLayer, INetworkDefinition, ParserError, OnnxParser, IOptimizationProfile, ITimingCache,
    IBuilderConfig, Builder,
)  # fmt: skip
