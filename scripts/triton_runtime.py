"""Finds a Triton server on this machine and says how to start it: files, environment, command line.

Triton comes from the files inside the `nvidia-pytriton` wheel (nothing of its Python code runs), or from an
installation such as /opt/tritonserver. Its Python backend needs a stub built for this very Python version and
the shared libpython; both are checked here, because Triton's own message about either is hard to read.
"""

import importlib.util
import shutil
import sys
import sysconfig
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from scripts.errors import TritonError, UsageError

STUB = "triton_python_backend_stub"
_YOUNG_S = 60.0
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

CREDENTIAL_HEADER: Final = "(?i)^authorization$"
"""A pattern that Triton looks for anywhere in a name. HTTP clients spell a header as they like."""

ADMIN_HEADER: Final = "admin-key"
"""Over gRPC the metadata is named triton-grpc-protocol-admin-key."""

GUARDED: Final = ("model-repository", "shared-memory", "trace", "logging", "statistics")
"""Statistics tell how much each model is asked, and when last. A model's configuration stays open: it holds
no path and no secret, and clients read it to learn how to ask."""


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """Where the parts of a Triton server lie."""

    server: Path
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...]


class TritonAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a Triton listens; `host` is an address to bind and to call."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002

    @property
    def client_host(self) -> str:
        """The address a client on this machine uses."""
        return "127.0.0.1" if self.host in ("", "0.0.0.0", "::") else self.host


class TritonLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One start of a server: what it serves and under which names it leaves traces on this machine."""

    address: TritonAddress
    backends: Path
    model_repository: Path
    models: tuple[str, ...]
    shm_prefix: str
    log: Path
    config: Path | None = None
    admin_key: str | None = None
    exit_timeout_s: int = 10
    more_flags: tuple[str, ...] = ()


def find_triton(root: Path | None = None) -> TritonInstall:
    """The Triton under `root` (such as /opt/tritonserver), else the one of the nvidia-pytriton wheel."""
    return _installed(root) if root is not None else _from_wheel()


def _from_wheel() -> TritonInstall:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise TritonError("no Triton server: run `make setup`, or name one with --triton /opt/tritonserver")
    package = Path(spec.origin).parent
    files = package / "tritonserver"
    return TritonInstall(
        server=_present(files / "bin" / "tritonserver"),
        python_backend=_present(files / "backends" / "python"),
        stub=_present(
            files / "python_backend_stubs" / _PYTHON / STUB, f"no Python backend stub for Python {_PYTHON}"
        ),
        libraries=(package.parent / "nvidia_pytriton.libs", _libpython_folder()),
    )


def _installed(root: Path) -> TritonInstall:
    backend = _present(root / "backends" / "python")
    return TritonInstall(
        server=_present(root / "bin" / "tritonserver"),
        python_backend=backend,
        stub=_present(backend / STUB),
        libraries=(root / "lib",),
    )


def _present(path: Path, problem: str = "Triton is incomplete") -> Path:
    if not path.exists():
        raise TritonError(f"{problem}: {path} is missing")
    return path


def _libpython_folder() -> Path:
    """The folder of the shared libpython; Debian keeps it in a package of its own."""
    name = sysconfig.get_config_var("INSTSONAME") or f"libpython{_PYTHON}.so.1.0"
    if not str(name).endswith((".so", ".so.1.0")):
        name = f"libpython{_PYTHON}.so.1.0"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    places = (sysconfig.get_config_var("LIBDIR") or "", f"/usr/lib/{multiarch}", "/usr/lib", "/usr/local/lib")
    for place in places:
        if place and (Path(place) / str(name)).exists():
            return Path(place)
    raise TritonError(f"Triton's Python backend needs {name}: sudo apt-get install libpython{_PYTHON}")


def lay_out_python_backend(install: TritonInstall, backends: Path) -> None:
    """Put Triton's Python backend, with the stub of this Python, into `backends`/python."""
    destination = backends / "python"
    destination.mkdir(parents=True, exist_ok=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        _copy_if_changed(_present(install.python_backend / name), destination / name)
    _copy_if_changed(install.stub, destination / STUB)


def _copy_if_changed(source: Path, destination: Path) -> None:
    old = destination.stat() if destination.exists() else None
    new = source.stat()
    if old is None or (old.st_size, int(old.st_mtime)) != (new.st_size, int(new.st_mtime)):
        scratch = destination.with_name(f".{destination.name}.new")
        try:
            shutil.copy2(source, scratch)
            scratch.replace(destination)
        finally:
            scratch.unlink(missing_ok=True)


def server_environment(
    install: TritonInstall, inherited: Mapping[str, str], *, config: Path | None
) -> dict[str, str]:
    """The environment of Triton and its stubs: this Python's packages, its libraries, our node settings."""
    environment = dict(inherited)
    environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONHOME", None)
    environment["PATH"] = _joined(str(Path(sys.executable).parent), inherited.get("PATH"))
    environment["LD_LIBRARY_PATH"] = _joined(*map(str, install.libraries), inherited.get("LD_LIBRARY_PATH"))
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("ORT_DISABLE_TELEMETRY", "1")  # else it notes each start in the home
    if config is not None:
        environment["TENSORCACHE_CONFIG"] = str(config.resolve())
    return environment


def _joined(*parts: str | None) -> str:
    return ":".join(part for part in parts if part)


def server_command(install: TritonInstall, launch: TritonLaunch) -> list[str]:
    """The command line; what its user adds comes last."""
    return [
        str(install.server),
        *what_flags(launch),
        *where_flags(launch.address),
        *door_flags(launch.admin_key),
        f"--backend-config=python,shm-region-prefix-name={launch.shm_prefix}",
        f"--exit-timeout-secs={launch.exit_timeout_s}",
        "--allow-gpu-metrics=false",
        "--strict-readiness=true",
        "--exit-on-error=false",
        *launch.more_flags,
    ]


def what_flags(launch: TritonLaunch) -> list[str]:
    """What it serves. Models are named one by one, so that loading stays under the control API."""
    return [
        f"--model-repository={launch.model_repository}",
        f"--backend-directory={launch.backends}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in launch.models),
    ]


def where_flags(address: TritonAddress) -> list[str]:
    """Where it listens."""
    return [
        f"--http-address={address.host}",
        f"--http-port={address.http_port}",
        f"--grpc-address={address.host}",
        f"--grpc-port={address.grpc_port}",
        f"--metrics-address={address.host}",
        f"--metrics-port={address.metrics_port}",
    ]


def door_flags(admin_key: str | None) -> list[str]:
    """Which header Triton hands on to a model, and which of its own doors open with the admin key alone.

    A key on a command line can be read in /proc by every user of the machine: Triton takes it no other way.
    """
    flags = [f"--{protocol}-header-forward-pattern={CREDENTIAL_HEADER}" for protocol in ("http", "grpc")]
    if admin_key is not None:
        guard = f"{','.join(GUARDED)}:{ADMIN_HEADER}={admin_key}"
        flags += [f"--http-restricted-api={guard}", f"--grpc-restricted-protocol={guard}"]
    return flags


def models_of(repository: Path) -> tuple[str, ...]:
    """Names of the models in a repository: the folders with a config.pbtxt."""
    if not repository.is_dir():
        raise UsageError(
            f"model repository {repository} is not a folder: `make run` makes one, or name it with --home"
        )
    names = tuple(sorted(path.parent.name for path in repository.glob("*/config.pbtxt")))
    if not names:
        raise UsageError(f"model repository {repository} holds no model (no */config.pbtxt)")
    return names


def remove_leftovers(
    prefix: str,
    folder: Path = Path("/dev/shm"),
    *,
    users: Collection[int] | None = None,
    proc: Path = Path("/proc"),
    now: float | None = None,
) -> list[str]:
    """Delete the shared-memory regions under our own prefix; with `users`, those that no such process maps.

    The users are the living stubs. Triton often keeps what a dead one shared: it needs no name for that, and
    the memory is freed with its last mapping. A young region stays: its stub may not have opened it yet.
    """
    if len(prefix) < 8:
        raise AssertionError(f"a prefix this short could match another server's regions: {prefix!r}")
    regions = list(folder.glob(f"{prefix}*"))
    if not regions:
        return []
    try:
        maps = "".join(_maps(proc / str(pid)) for pid in users or ())
    except PermissionError:
        return []  # nobody can tell what is in use
    now = time.time() if now is None else now
    names = []
    for path in regions:
        if str(path) in maps or (users is not None and now - _changed(path) < _YOUNG_S):
            continue
        path.unlink(missing_ok=True)
        names.append(path.name)
    return names


def _maps(process: Path) -> str:
    try:
        return (process / "maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it ended


def _changed(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except FileNotFoundError:
        return 0.0
