"""What the tests of a GPU node share: SmolLM2 built, signed, loaded and opened as a server would, once
each."""

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from engines import (
    Engine,
    EngineOptions,
    EngineSpec,
    TrustSettings,
    build_release,
    demo_gguf,
    generate_signing_key,
    load_gguf,
    load_release_dir,
    open_engine,
    sign_release,
)
from engines.build import BuildOptions
from engines.cuda import open_device
from engines.decoder import Decoder
from tests.gpu.torch_reference import Precision, Reference, reference

MODEL = "smollm2"
LANES = 4
MAX_SEQ_LEN = 543  # with the scratch position 17 whole blocks; windows of 256, 512 and all of it
CHUNK = 256


class Node:
    """Made once for a session; engines that tests share are closed at its end."""

    def __init__(self, folder: Path, load: Callable[[], Decoder] = lambda: load_gguf(demo_gguf())) -> None:
        self._folder = folder
        self._load = load
        self._private, self.public_key = generate_signing_key(folder / "keys")
        self._releases: dict[Precision, Path] = {}
        self._references: dict[Precision, Reference] = {}
        self._engines: dict[tuple[Precision, bool], Engine] = {}

    @functools.cached_property
    def decoder(self) -> Decoder:
        """SmolLM2-135M-Instruct from the wheel, unless somebody brought another one."""
        return self._load()

    def release(self, precision: Precision) -> Path:
        """A signed release folder; built on this very GPU."""
        if precision not in self._releases:
            started = time.monotonic()
            options = BuildOptions(
                target="tensorrt", precision=precision, lanes=LANES, max_seq_len=MAX_SEQ_LEN,
                max_prefill_tokens=CHUNK,
            )  # fmt: skip
            home = self._folder / precision
            folder = build_release(self.decoder, home, model=MODEL, release=1, options=options)
            sign_release(folder, self._private)
            self._releases[precision] = folder
            print(f"\nbuilt {MODEL} in {precision} in {time.monotonic() - started:.0f} s")
        return self._releases[precision]

    def open(
        self, precision: Precision, *, cuda_graphs: bool = True, beside: EngineSpec | None = None
    ) -> Engine:
        """Another engine, through the whole load chain; the caller closes it."""
        trust = TrustSettings(keys=(self.public_key,))
        release = load_release_dir(self.release(precision), model=MODEL, trust=trust)
        return open_engine(release, EngineOptions(cuda_graphs=cuda_graphs), beside=beside)

    def engine(self, precision: Precision, *, cuda_graphs: bool = True) -> Engine:
        """The engine that tests share."""
        key = precision, cuda_graphs
        if key not in self._engines:
            self._engines[key] = self.open(precision, cuda_graphs=cuda_graphs)
        return self._engines[key]

    def reference(self, precision: Precision) -> Reference:
        """A sequence that fills a lane, and what torch says of it."""
        if precision not in self._references:
            vocab = self.decoder.config.geometry.vocab_size
            tokens = np.random.default_rng(5).integers(1, vocab, MAX_SEQ_LEN)
            self._references[precision] = reference(self.decoder, tokens, precision)
        return self._references[precision]

    def close(self) -> None:
        """Close what tests shared."""
        while self._engines:
            self._engines.popitem()[1].close()


def memory_in_use() -> Mapping[str, int]:
    """Bytes that GPU 0 has given out, to whomever, and bytes of this process in host memory."""
    device = open_device(0)
    with device.current():
        free, total = device.memory()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(line.split()[1] for line in status if line.startswith("VmRSS:"))
    return {"device": total - free, "host": int(resident) << 10}
