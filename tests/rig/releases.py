"""TensorRT releases on the rig: built by the builder itself, opened as they are or with a changed graph."""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx

from engines.contract import EngineSpec
from engines.manifest import MANIFEST, EngineManifest, parse_manifest
from engines.options import EngineOptions
from engines.tensorrt_engine import TensorRTEngine
from tests.rig import plans

Change = Callable[[onnx.GraphProto], None]


def read_release(folder: Path) -> tuple[EngineManifest, Mapping[str, memoryview]]:
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    return manifest, {name: memoryview((folder / name).read_bytes()) for name in manifest.files}


def open_on_rig(
    folder: Path, *, change: Change | None = None, beside: EngineSpec | None = None, cuda_graphs: bool = True
) -> TensorRTEngine:
    """An engine over a release folder, without the load chain."""
    manifest, files = read_release(folder)
    if change is not None:
        plan = plans.changed(files[manifest.graph], change)
        files = {**files, manifest.graph: memoryview(plan)}
    options = EngineOptions(cuda_graphs=cuda_graphs)
    return TensorRTEngine(manifest, files, options=options, digest=folder.name, beside=beside)
