"""TensorRT releases on the rig: built by the builder itself, opened as they are or with a changed graph.

The rig must be plugged in.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from engines.build import build_release
from engines.build_options import BuildOptions, Precision
from engines.contract import EngineSpec
from engines.decoder import Decoder
from engines.manifest import MANIFEST, EngineManifest, parse_manifest
from engines.onnx_emit import EmittedGraph
from engines.options import EngineOptions
from engines.tensorrt_engine import TensorRTEngine
from tests.rig import plans

Change = Callable[[EmittedGraph], EmittedGraph]


def rig_release(
    decoder: Decoder, folder: Path, *, precision: Precision = "float16", max_seq_len: int = 240,
    lanes: int = 4, release: int = 1,
) -> Path:  # fmt: skip
    """The release folder of `decoder`; blocks of 16 tokens, prefills of up to 128."""
    options = BuildOptions(
        target="tensorrt", precision=precision, lanes=lanes, max_seq_len=max_seq_len, block_tokens=16,
        max_prefill_tokens=128,
    )  # fmt: skip
    return build_release(decoder, folder, model="small", release=release, options=options)


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
