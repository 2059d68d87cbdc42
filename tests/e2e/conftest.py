"""One real Triton for all end-to-end tests: started by `tensorcache serve`, on ports of its own."""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import pytest

from engines import generate_signing_key, sign_release
from engines.manifest import EngineManifest, encode_manifest, parse_manifest
from scripts.backend_layout import lay_out_backend, write_model_config, write_node_config
from scripts.deploy import publish
from scripts.server_process import StubProcess, children, living_stubs
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import TritonAddress
from tests.free_ports import free_ports

MODEL = "smollm2"
FACADE = "smollm2_sync"
LANES = 4
QUEUE = 8
MAX_SEQ_LEN = 2048


@dataclass(frozen=True)
class Home:
    """A serving home with a signed release in it."""

    root: Path
    public_key: Path
    private_key: Path
    cluster: str

    @property
    def repository(self) -> Path:
        return self.root / "model_repository"

    def arenas(self) -> list[Path]:
        return sorted(Path("/dev/shm").glob(f"tensorcache_{self.cluster}_*"))


class Command:
    """A `tensorcache` verb running in a process of its own, its lines readable while it runs."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.cli", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, source: IO[str]) -> None:
        for line in source:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def wait_for(self, text: str, *, limit_s: float) -> str:
        """The next line with `text` in it."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {text!r} within {limit_s} s:\n" + "\n".join(self.lines)) from None
            if line is None:
                raise AssertionError(f"ended without {text!r}:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if text in line:
                return line

    def rest(self, *, limit_s: float) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + limit_s
        while (line := self._queue.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            self.lines.append(line)
        code = self.process.wait(timeout=5)
        self._reader.join(timeout=5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def server_pid(self) -> int:
        """The tritonserver it supervises."""
        (pid,) = [pid for pid in children(self.process.pid) if "tritonserver" in command_line(pid)]
        return pid

    def end(self) -> None:
        """For teardown: stop it, by force if it must be."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=40)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


@dataclass(frozen=True)
class Triton:
    """The running server."""

    home: Home
    address: TritonAddress
    http: TritonHttp
    command: Command

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.address.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"127.0.0.1:{self.address.http_port}"

    def stubs(self) -> list[StubProcess]:
        return living_stubs(self.command.server_pid())

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `tensorcache_<name>` whose labels are among `labels`."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in self.http.metrics().splitlines()
            if line.startswith(f"tensorcache_{name}{{") and all(text in line for text in wanted)
        )


def parameter(name: str, value: object) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


@pytest.fixture(scope="session")
def signed_demo(demo_release: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The demo release, signed, with its private and public key."""
    folder = tmp_path_factory.mktemp("signed")
    private, public = generate_signing_key(folder / "keys")
    release = folder / "release"
    shutil.copytree(demo_release, release, copy_function=os.link)  # weights are large and never written
    sign_release(release, private)
    return release, private, public


def make_home(
    root: Path, signed: tuple[Path, Path, Path], *, cluster: str, settings: dict[str, object]
) -> Home:
    """Backend, models, node settings; `settings` are the decoder's parameters."""
    release, private, public = signed
    home = Home(root=root, public_key=public, private_key=private, cluster=cluster)
    home.repository.mkdir(parents=True)
    lay_out_backend(root / "backends")
    write_node_config(root / "tensorcache.toml", keys=(public,), cluster=cluster, host_bytes=512 << 20)
    publish(MODEL, release, repository=home.repository, keys=(public,))
    config = home.repository / MODEL / "config.pbtxt"
    config.write_text(config.read_text() + "".join(parameter(*item) for item in settings.items()))
    return home


@pytest.fixture(scope="session")
def home(signed_demo: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    settings = {"lanes": LANES, "max_seq_len": MAX_SEQ_LEN, "threads": 2, "max_queue_size": QUEUE}
    root = tmp_path_factory.mktemp("home") / "run"
    made = make_home(root, signed_demo, cluster=f"e2e-{os.getpid()}", settings=dict(settings))
    yield made
    for arena in made.arenas():
        arena.unlink()


@pytest.fixture(scope="session")
def triton(home: Home) -> Iterator[Triton]:
    """The shared server. At the end it must stop in order and leave nothing but the arena."""
    ports = free_ports(3)
    address = TritonAddress(http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2])
    command = Command(
        "serve", "--home", str(home.root), "--http-port", str(ports[0]), "--grpc-port", str(ports[1]),
        "--metrics-port", str(ports[2]), "--pause-limit", "1",  # many a test here kills what is served
    )  # fmt: skip
    try:
        command.wait_for("serving smollm2", limit_s=120)
        key = (home.root / "admin.key").read_text().strip()
        yield Triton(home, address, TritonHttp(address, admin_key=key), command)
        command.process.send_signal(signal.SIGTERM)
        assert command.rest(limit_s=40) == 0
    finally:
        command.end()
        log = home.root / "triton.log"
        if os.environ.get("KEEP_TRITON_LOG"):
            print(log.read_text())


def foreign_release(source: Path, destination: Path, *, private: Path, model: str) -> Path:
    """A copy of a small release, renamed and signed again."""
    shutil.copytree(source, destination)
    manifest = parse_manifest((source / "engine.json").read_bytes())
    renamed: EngineManifest = msgspec.structs.replace(manifest, model=model)
    (destination / "engine.json").write_bytes(encode_manifest(renamed))
    sign_release(destination, private)
    return destination


def add_model(home: Home, model: str, *, config: str = "") -> Path:
    """A model folder with the shipped configuration and `config` appended; its config.pbtxt."""
    write_model_config(home.repository, model)
    shutil.rmtree(home.repository / f"{model}_sync")
    path = home.repository / model / "config.pbtxt"
    path.write_text(path.read_text() + config)
    return path


from tests.e2e.guarded import guarded  # noqa: E402, F401  # a fixture; it needs what stands above
