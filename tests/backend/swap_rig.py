"""A version folder with releases of the small decoder, and a service over it that swaps while it is asked."""

import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from backend.access import open_access
from backend.composition import open_decoder
from backend.settings import ModelSettings, NodeSettings, SecretsSettings
from cachemgr import CacheSecrets, CacheSettings
from engines import TrustSettings, generate_signing_key, sign_release
from engines.build import BuildOptions, build_release
from engines.loading import load_release_dir
from tests.backend.service_rig import Caller
from tests.backend.test_metrics import Recorded
from tests.engines.random_decoder import random_decoder
from tests.waiting import wait_until

SLOW_S, LOOK_S = 0.5, 0.005
SMALL = BuildOptions(precision="int8", lanes=4, max_seq_len=250, block_tokens=16, max_prefill_tokens=128)


class Shelf:
    """Signed releases of the small decoder by name, and a version folder that names one of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        generate_signing_key(root / "keys")
        self.trust = TrustSettings((root / "keys" / "release.pub",))
        self.version = root / "small" / "1"
        (self.version / "releases").mkdir(parents=True)
        CacheSecrets.generate(root / "secrets")
        self.digests: dict[str, str] = {}

    def add(self, name: str, *, release: int = 1, seed: int = 1, options: BuildOptions = SMALL) -> str:
        """Build, sign, put on the shelf; its digest. Equal seeds are equal weights: the same kv_identity."""
        out = self.root / f"built-{name}"
        built = build_release(random_decoder(seed=seed), out, model="small", release=release, options=options)
        sign_release(built, self.root / "keys" / "release.key")
        digest = load_release_dir(built, model="small", trust=self.trust).digest
        shutil.copytree(built, self.folder(digest))
        self.digests[name] = digest
        return digest

    def add_corrupt(self, name: str, *, like: str) -> str:
        """One whose weights are not those that were signed."""
        digest = self.add(name, release=99)
        path = self.folder(digest) / "weights.bin"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        return digest

    def folder(self, digest: str) -> Path:
        return self.version / "releases" / digest

    def point(self, name: str) -> str:
        """Make it the current one, by rename."""
        digest = self.digests[name]
        beside = self.version / ".current"
        beside.write_text(digest + "\n")
        os.replace(beside, self.version / "current")
        return digest


@dataclass
class SwapCaller(Caller):
    """A caller that knows which release read its request, by the last of its senders."""

    generations: list = field(default_factory=list)

    def for_(self, generation):
        if generation is not None:
            self.generations.append(generation)
        return self

    @property
    def release(self) -> str:
        return self.generations[-1].release


class SwapRig:
    """The service over a shelf."""

    def __init__(self, shelf: Shelf, *, host_bytes=16 << 20, arenas: Path | None = None, **settings) -> None:
        self.shelf = shelf
        self.recorded = Recorded()
        cache = CacheSettings(host_bytes=host_bytes, directory=str(arenas or shelf.root))
        node = NodeSettings(shelf.trust, SecretsSettings(shelf.root / "secrets"), cache)
        self.service = open_decoder(
            "small", shelf.version,
            settings=ModelSettings(**{"threads": 1, "swap_poll_s": 0.05, **settings}),
            node=node, access=open_access("m"), instruments=self.recorded, labels={"model": "m"},
        )  # fmt: skip

    def start(self, prompt, *, parameters=None, **options) -> SwapCaller:
        caller = SwapCaller()
        inputs = {
            "input_ids": np.array(prompt, np.int32),
            "ignore_eos": np.array([True]),
            "stream": np.array([True]),
        }
        for name, value in options.items():
            kind = {"seed": np.uint64, "temperature": np.float32, "no_cache": np.bool_}.get(name, np.int32)
            inputs[name] = np.array([value], kind)
        self.service.handle("r", lambda: inputs, parameters or {}, sender=caller.for_)
        return caller

    def ask(self, prompt, **options) -> SwapCaller:
        return self.start(prompt, **options).wait()

    def slow_down(self) -> threading.Event:
        """Let the engine that serves now decode only where somebody waits for a turn, until told.

        However slow the machine, a swap takes a number of steps that is known. The limit is for those
        who wait for another stepper's step.
        """
        hurry = threading.Event()
        loop = self.service._loop
        engine = loop.serving._engine
        decode = engine.decode

        def slow(*arguments):
            limit = time.monotonic() + SLOW_S
            while loop._inbox.empty() and time.monotonic() < limit and not hurry.wait(LOOK_S):
                pass
            return decode(*arguments)

        engine.decode = slow
        return hurry

    def swap(self, name: str) -> None:
        """Point `current` there and wait until it serves."""
        digest = self.shelf.point(name)
        wait_until(lambda: self.service.release == digest)

    def swaps(self, reason: str) -> float:
        return self.recorded.value("swaps_total", reason=reason)

    def close(self) -> None:
        self.service.close()

    def __enter__(self) -> "SwapRig":
        return self

    def __exit__(self, *failure) -> None:
        self.close()
