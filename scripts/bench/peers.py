"""Other engines to compare with, each in a process of its own environment, asked by line JSON over a pipe.

One question, one answer: {"op": "prefill", "tokens": [...], "variant": "..."} → {"seconds": 0.71}. A peer
that fails answers {"error": "..."}; one that is silent past the deadline is killed.

Threads: one caller per peer.
"""

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from scripts.bench.harness import PeerMissingError

PeerKind = Literal["llamacpp", "openvino"]
PACKAGES: Mapping[PeerKind, str] = {
    "llamacpp": "llama-cpp-python==0.3.36",
    "openvino": "openvino-genai==2026.4.1.0",
}
MODULES: Mapping[PeerKind, str] = {"llamacpp": "llama_cpp", "openvino": "openvino_genai"}
StoreKind = Literal["mooncake", "lmcache"]
STORE_PACKAGES: Mapping[StoreKind, str] = {
    "mooncake": "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    "lmcache": "lmcache==0.5.6 torch==2.13.0",
}
STORE_MODULES: Mapping[StoreKind, str] = {"mooncake": "mooncake", "lmcache": "lmcache"}
VARIANTS: Mapping[str, tuple[str, ...]] = {"llamacpp": ("flash", "plain"), "openvino": ("PA", "SDPA")}
"""Ways to run a peer; a row takes the quicker one on this machine."""

_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PYTHON = Path("build/peers/venv/bin/python")


class PeerError(Exception):
    """The peer is installed but did not answer as asked."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Where the peers live and what they run."""

    python: Path
    gguf: Path
    threads: int
    logs: Path


class Peer:
    """One running peer, started by `open_peer`. Use it as a context manager."""

    def __init__(
        self, kind: PeerKind | StoreKind, command: Sequence[str], *, log: Path, start_limit_s: float = 120.0
    ) -> None:
        """Start `command` and wait for its first answer; PeerError if there is none."""
        self.kind = kind
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            )
        self._waiting = b""
        try:
            self.ask("hello", limit_s=start_limit_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()

    def ask(self, op: str, fields: Mapping[str, object] = {}, *, limit_s: float = 120.0) -> dict[str, Any]:
        """Send a question, wait for the answer; PeerError for an error, an early end, no answer in time."""
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:
            raise PeerError(f"{self.kind} ended: {self._last_words()}") from None
        answer: dict[str, Any] = json.loads(self._read_line(time.monotonic() + limit_s))
        if "error" in answer:
            raise PeerError(f"{self.kind} {op}: {answer['error']}")
        return answer

    def seconds(self, op: str, tokens: Iterable[int], **fields: object) -> float:
        """Seconds of one operation on a prompt, as the peer measured it."""
        return float(self.ask(op, {"tokens": [int(token) for token in tokens], **fields})["seconds"])

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._waiting:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise PeerError(f"{self.kind} gave no answer in time")
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise PeerError(f"{self.kind} ended: {self._last_words()}")
                self._waiting += data
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"

    def close(self) -> None:
        """Kill and reap the process. Idempotent."""
        self._process.kill()
        self._process.wait(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def open_peer(kind: PeerKind, settings: PeerSettings) -> Peer:
    """Start a peer; PeerMissingError if it is not installed."""
    require(kind, settings.python)
    arguments = (kind, str(settings.gguf), str(settings.threads))
    command = [str(settings.python), "-m", "scripts.bench.peer_worker", *arguments]
    return Peer(kind, command, log=settings.logs / f"peer-{kind}.log")


def open_store(kind: StoreKind, settings: PeerSettings) -> Peer:
    """Start a store of another project; PeerMissingError if it is not installed, or does not start here."""
    _require(settings.python, package=STORE_PACKAGES[kind], module=STORE_MODULES[kind])
    command = [str(settings.python), "-m", "scripts.bench.peer_stores", kind]
    try:
        return Peer(kind, command, log=settings.logs / f"peer-{kind}.log")
    except PeerError as error:  # a library of the system may be missing: libibverbs1, libnuma1
        raise PeerMissingError(f"{kind} does not start: {error}") from None


def require(kind: PeerKind, python: Path) -> None:
    """PeerMissingError unless the peers' environment is there and can find the package."""
    _require(python, package=PACKAGES[kind], module=MODULES[kind])


def _require(python: Path, *, package: str, module: str) -> None:
    hint = "run `make bench-peers`"
    if not python.exists():
        raise PeerMissingError(f"no peers at {python}: {hint}")
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([str(python), "-c", probe], timeout=30, check=False).returncode:
        raise PeerMissingError(f"{package} is not installed in {python.parent.parent}: {hint}")


def quicker_variant(peer: Peer, op: str, prompt: Callable[[], Iterable[int]], **fields: object) -> str:
    """The variant that needs least time for `op`: the best of two tries in turn, after one to warm up.

    `prompt` gives a new prompt at every call.
    """
    tries: dict[str, list[float]] = {variant: [] for variant in VARIANTS[peer.kind]}
    for _ in range(3):
        for variant, seconds in tries.items():
            seconds.append(peer.seconds(op, prompt(), variant=variant, **fields))
    return min(tries, key=lambda variant: min(tries[variant][1:]))
