"""The models of the GPU rows: built for this card, signed and loaded as a server would, once for all rows."""

import dataclasses
import functools
import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

import engines
from engines import (
    Engine,
    EngineOptions,
    TrustSettings,
    VerifiedRelease,
    build_release,
    demo_gguf,
    generate_signing_key,
    load_gguf,
    load_release_dir,
    open_engine,
    sign_release,
)
from engines.build import BuildOptions
from engines.decoder import Decoder
from engines.host_memory import available_bytes
from engines.layer_report import REPORT_FILE, LayerReport, read_report
from engines.manifest import SIGNATURE
from scripts.bench.gpu_llama import random_llama, weight_count
from scripts.bench.harness import PeerMissingError

Model = Literal["smollm2", "llama8b"]
Precision = Literal["float16", "bfloat16"]

MAX_SEQ_LEN = 4096 + 31  # with the scratch position whole blocks; windows of 256 … 4,096 and all of it
LANES = 8
TOKENIZER = "tokenizer.json"

_8B_BYTES = 2 * weight_count()
# of host memory: the plan that TensorRT hands over, and its own copy of the weights meanwhile
_8B_HOST = int(2.3 * _8B_BYTES)
# of disk: the weights, gone after the build, and the plan
_8B_DISK = int(2.1 * _8B_BYTES)
# of the GPU: the rows against TensorRT's own step hold weights and lanes twice
_8B_DEVICE = int(2.8 * _8B_BYTES)
_8B_SAYS = (
    "a random engine of Llama-3-8B's shape is built first: about "
    f"{_8B_DISK >> 30} GiB of disk under {{folder}}, {_8B_HOST >> 30} GiB of host memory, "
    f"{_8B_DEVICE >> 30} GiB on the GPU and 10 to 30 minutes (a guess: it was never timed); "
    "--without-8b leaves it out"
)


class LeftOutError(PeerMissingError):
    """Rows that somebody chose not to measure."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """An engine, and its release without the plan: what text and settings need of it."""

    engine: Engine
    release: VerifiedRelease


class GpuSubject:
    """Lazily made things that several measurements use. One thread."""

    def __init__(
        self,
        folder: Path,
        *,
        precision: Precision = "float16",
        with_8b: bool = True,
        decoders: Mapping[Model, Callable[[], Decoder]] | None = None,
    ) -> None:
        """`decoders`: other weights than the real ones."""
        self.folder = folder
        self.precision = precision
        self._with_8b = with_8b
        self._decoders = decoders or {"smollm2": _smollm2, "llama8b": _llama8b}
        self._seed = itertools.count()

    @functools.cached_property
    def keys(self) -> tuple[Path, Path]:
        """A private and a public key made for this folder."""
        folder = self.folder / "keys"
        pair = folder / "release.key", folder / "release.pub"
        return pair if all(path.exists() for path in pair) else generate_signing_key(folder)

    def release_folder(self, model: Model) -> Path:
        """The signed release; built at the first call for this code, precision and card."""
        if model == "llama8b" and not self._with_8b:
            raise LeftOutError("left out (--without-8b)")
        home = self.folder / "gpu" / f"{model}-{self.precision}-{self._made_by()}"
        found = [path.parent for path in home.glob(f"*/{SIGNATURE}")]
        if found:
            return found[0]
        for outdated in home.parent.glob(f"{model}-{self.precision}-*"):
            shutil.rmtree(outdated)
        if self._decoders[model] is _llama8b:
            self._announce_8b()
        options = BuildOptions(
            target="tensorrt", precision=self.precision, lanes=LANES, max_seq_len=MAX_SEQ_LEN
        )
        started = time.monotonic()
        release = build_release(self._decoders[model](), home, model=model, release=1, options=options)
        sign_release(release, self.keys[0])
        print(f"built {model} in {self.precision} in {time.monotonic() - started:.0f} s", flush=True)
        return release

    def layers(self, model: Model) -> LayerReport:
        """Which layers of the plan run fused."""
        return read_report((self.release_folder(model) / REPORT_FILE).read_bytes())

    def release(self, model: Model) -> VerifiedRelease:
        """The release through the whole load chain: its plan is in memory as long as this is."""
        trust = TrustSettings(keys=(self.keys[1],))
        return load_release_dir(self.release_folder(model), model=model, trust=trust)

    @contextmanager
    def opened(self, model: Model) -> Iterator[Opened]:
        """An engine, closed at the end."""
        release = self.release(model)
        engine = open_engine(release, EngineOptions())
        release = dataclasses.replace(release, files={TOKENIZER: release.files[TOKENIZER]})
        try:
            yield Opened(engine, release)
        finally:
            engine.close()

    def prompt(self, engine: Engine, tokens: int) -> npt.NDArray[np.int64]:
        """Random tokens, others at every call, so that no cache has seen them."""
        return np.random.default_rng(next(self._seed)).integers(
            1, engine.spec.geometry.vocab_size, tokens, dtype=np.int64
        )

    def _announce_8b(self) -> None:
        """Say what the build takes, and refuse where it cannot fit."""
        print(_8B_SAYS.format(folder=self.folder), flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        disk, host = shutil.disk_usage(self.folder).free, available_bytes()
        for what, need, free in (("disk", _8B_DISK, disk), ("host memory", _8B_HOST, host)):
            if free is not None and free < need:
                raise RuntimeError(
                    f"{what}: the 8B-shaped engine needs {need >> 30} GiB, free are {free >> 30} GiB "
                    "(--without-8b leaves it out)"
                )

    def _made_by(self) -> str:
        """Changes with the code that releases are built by, and with the card."""
        from engines.driver import require_driver
        from engines.trt import library_version

        digest = hashlib.sha256(f"{require_driver().name} {library_version()}".encode())
        for source in sorted(Path(engines.__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]


def _smollm2() -> Decoder:
    return load_gguf(demo_gguf())


def _llama8b() -> Decoder:
    return random_llama(_smollm2().tokenizer_json)
