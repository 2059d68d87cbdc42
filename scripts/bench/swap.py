"""The row of swaps: how much slower tokens come while a release is swapped under running streams."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from backend.composition import open_decoder
from backend.service import DecoderService
from backend.settings import ModelSettings, NodeSettings, SecretsSettings
from cachemgr import CacheSettings
from engines import TrustSettings, load_release_dir, sign_release
from engines.manifest import MANIFEST, SIGNATURE, encode_manifest, parse_manifest
from scripts.bench.decoder import Decoder, Heard, NoInstruments, everybody
from scripts.bench.harness import Reading
from scripts.bench.subject import MODEL, Subject

_STREAMS = 4
_PROMPT = 64
_ANSWER = 96
_SWAPS = 12
_QUIET_S = 5.0
_LIMIT_S = 120.0
_LOOK_S = 0.005


def swap_tpot(subject: Subject) -> Iterator[Reading]:
    """p99 of the time per output token of answers that a swap fell into, against that of the others."""
    with _two_releases(subject) as (version_dir, digests), _serving(subject, version_dir) as service:
        streams = _Streams(subject, Decoder(service))
        swaps: list[tuple[float, float]] = []
        streams.run(lambda: streams.answers >= 2 * _STREAMS)  # warm
        streams.forget()
        for turn in range(_SWAPS):
            streams.run(_after(_QUIET_S, streams, since=time.perf_counter()))
            began = time.perf_counter()
            _point(version_dir, digests[(turn + 1) % 2])
            streams.run(partial(_serves, service, digests[(turn + 1) % 2]))
            swaps.append((began, time.perf_counter()))
        streams.finish()
        during, quiet = streams.tpot(swaps)
    swapped, normal = (float(np.percentile(values, 99)) for values in (during, quiet))
    took = float(np.median([end - begin for begin, end in swaps]))
    detail = (
        f"{1e3 * swapped:.1f} ms in {len(during)} answers that {_SWAPS} swaps of {took:.1f} s fell into, "
        f"{1e3 * normal:.1f} ms in {len(quiet)} others; {_STREAMS} streams of {_PROMPT} + {_ANSWER} tokens"
    )
    yield Reading("backend.swap_tpot_p99", swapped / normal, detail)


def _after(seconds: float, streams: "_Streams", *, since: float) -> Callable[[], bool]:
    """So long, and until every stream had an answer that no swap fell into."""
    return lambda: time.perf_counter() >= since + seconds and streams.begun_after(since) >= _STREAMS


def _serves(service: DecoderService, digest: str) -> bool:
    return service.release == digest


@dataclass(slots=True)
class _Streams:
    """Keeps a number of answers running."""

    subject: Subject
    decoder: Decoder
    running: list[Heard] = field(default_factory=list)
    ended: list[Heard] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return len(self.ended)

    def run(self, until: Callable[[], bool]) -> None:
        """Start a new answer for each that ends, until `until` holds."""
        deadline = time.perf_counter() + _LIMIT_S
        while not until():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"no swap within {_LIMIT_S:.0f} s")
            self._collect()
            while len(self.running) < _STREAMS:
                self.running.append(self.decoder.ask(self.subject.prompt(_PROMPT), max_tokens=_ANSWER))
            self.running[0].ended.wait(_LOOK_S)

    def forget(self) -> None:
        """Count from here."""
        self.ended.clear()

    def begun_after(self, moment: float) -> int:
        """Answers that came, from the first token to the last, after `moment`."""
        return sum(heard.arrivals[0] > moment for heard in self.ended)

    def finish(self) -> None:
        """Wait for what runs."""
        for heard in self.running:
            heard.wait()
        self._collect()

    def tpot(self, swaps: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """Seconds per output token of the answers that a swap fell into, and of the others."""
        during: list[float] = []
        quiet: list[float] = []
        for heard in self.ended:
            first, last = heard.arrivals[0], heard.arrivals[-1]
            touched = any(first < end and begin < last for begin, end in swaps)
            (during if touched else quiet).append((last - first) / (heard.tokens - 1))
        return during, quiet

    def _collect(self) -> None:
        self.ended += [heard.wait() for heard in self.running if heard.ended.is_set()]
        self.running = [heard for heard in self.running if not heard.ended.is_set()]


@contextmanager
def _two_releases(subject: Subject) -> Iterator[tuple[Path, tuple[str, str]]]:
    """A version folder with the demo release, which is current, and the same under the next number."""
    built = subject.release_folder()
    trust = TrustSettings(keys=(subject.keys[1],))
    with tempfile.TemporaryDirectory(dir=subject.settings.folder) as folder:
        version_dir = Path(folder) / MODEL / "1"
        made = Path(folder) / "next"
        shutil.copytree(
            built, made, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST, SIGNATURE)
        )
        manifest = parse_manifest((built / MANIFEST).read_bytes())
        later = msgspec.structs.replace(manifest, release=manifest.release + 1)
        (made / MANIFEST).write_bytes(encode_manifest(later))
        sign_release(made, subject.keys[0])
        digests = []
        for release in (built, made):
            digest = load_release_dir(release, model=MODEL, trust=trust).digest
            shutil.copytree(release, version_dir / "releases" / digest, copy_function=os.link)
            digests.append(digest)
        _point(version_dir, digests[0])
        yield version_dir, (digests[0], digests[1])


def _point(version_dir: Path, digest: str) -> None:
    beside = version_dir / ".current"
    beside.write_text(digest + "\n")
    beside.replace(version_dir / "current")


@contextmanager
def _serving(subject: Subject, version_dir: Path) -> Iterator[DecoderService]:
    settings = ModelSettings(
        lanes=8, max_seq_len=2048, threads=subject.settings.threads, cache="off", swap_poll_s=0.05
    )
    trust = TrustSettings(keys=(subject.keys[1],))
    node = NodeSettings(trust, SecretsSettings(version_dir / "secrets"), CacheSettings())
    service = open_decoder(
        MODEL, version_dir, settings=settings, node=node, access=everybody(),
        instruments=NoInstruments(), labels={},
    )  # fmt: skip
    try:
        yield service
    finally:
        service.close()
