"""Device memory: what an engine needs of it, checked before it is taken, and how much of it is in use."""

from dataclasses import dataclass

from engines.contract import EngineSpec
from engines.cuda import open_device
from engines.device_pool import kv_bytes, layer_bytes
from engines.errors import ReleaseError
from engines.manifest import EngineManifest
from engines.windows import MAX_GRAPHS, row_counts, windows

# an allowance: TensorRT-LLM's source notes 4 to 10 MB of device memory a graph; not measured here
_GRAPH_LAYER_BYTES = 160 << 10


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Bytes by what they are for; what kernels' code will take is not known before."""

    weights: int
    activations: int
    kv: int
    buffers: int
    graphs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations + self.kv + self.buffers + self.graphs

    def __str__(self) -> str:
        return (
            f"{self.total} bytes of device memory (weights {self.weights}, activations {self.activations}, "
            f"KV {self.kv}, buffers {self.buffers}, graphs {self.graphs})"
        )


def device_need(spec: EngineSpec, manifest: EngineManifest, *, adopts: bool, cuda_graphs: bool) -> DeviceNeed:
    """What the engine `spec` will take; `adopts`: its lanes are there already, but it warms up on a few."""
    shapes = len(row_counts(spec.lanes)) * len(windows(spec.positions)) if cuda_graphs else 0
    built = manifest.tensorrt.profiles if manifest.tensorrt is not None else ()
    kv = kv_bytes(spec, lanes=spec.lanes)
    if adopts:
        kv = kv_bytes(spec, lanes=1) + (layer_bytes(spec) if spec.lanes > 1 else 0)
    return DeviceNeed(
        weights=manifest.files[manifest.graph].size,
        activations=max((profile.activation_bytes for profile in built), default=0),
        kv=kv,
        buffers=2 * logits_bytes(spec),
        graphs=min(shapes, MAX_GRAPHS) * spec.geometry.layers * _GRAPH_LAYER_BYTES,
    )


def logits_bytes(spec: EngineSpec) -> int:
    """Bytes of the logits of every lane."""
    return spec.lanes * spec.geometry.vocab_size * 4


def require_device_memory(need: DeviceNeed, *, free: int) -> None:
    """Refuse with ReleaseError (step "gpu_memory") what does not fit."""
    if need.total > free:
        raise ReleaseError(
            "gpu_memory",
            expected=f"{need}; fewer lanes need less",
            found=f"{free} bytes free",
        )


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """Bytes of a GPU's memory, whoever uses them."""

    used: int
    total: int


def device_memory_use(ordinal: int) -> DeviceMemoryUse:
    """How full the GPU `ordinal` is now. From any thread. DeviceError."""
    device = open_device(ordinal)
    with device.current():
        free, total = device.memory()
    return DeviceMemoryUse(used=total - free, total=total)
