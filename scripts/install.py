"""`tensorcache install`: lay out backend and models for an existing Triton, and prove that they import."""

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.arguments import Verbs, add_verb, path, positive
from scripts.backend_layout import TEMPLATE_MODEL, lay_out_backend, write_model_config, write_node_config
from scripts.console import say, working
from scripts.errors import RejectedError, UsageError
from scripts.kept_settings import host_bytes_of, untrusted_keys

EXAMPLES = """
  tensorcache install --dest /opt/tritonserver/backends --model-repo /models --key keys/release.pub
  tensorcache install --dest backends --model-repo models --key release.pub --python-deps --python python3.12
  tensorcache install --dest backends --model-repo models --key release.pub --python-deps --extra gpu-cu13
"""
GPU_EXTRAS = ("gpu-cu12", "gpu-cu13")
CONSTRAINTS = Path(__file__).resolve().parent / "constraints.txt"

# The backend is imported from its folder as Triton's stub does it. The stub's own module exists only inside
# the stub: a stand-in that has any name takes its place.
SMOKE_TEST = """
import sys, types
folder = sys.argv[1]
class Names(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
sys.modules["triton_python_backend_utils"] = Names("triton_python_backend_utils")
sys.path.append(folder)
import model, backend, engines, cachemgr
for module in (model, backend, engines, cachemgr):
    assert module.__file__.startswith(folder + "/"), f"{module.__name__} came from {module.__file__}"
assert hasattr(model, "TritonPythonModel"), "model.py has no TritonPythonModel"
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "install", summary="lay out backend and models for an existing Triton", examples=EXAMPLES
    )
    parser.add_argument("--dest", type=path, required=True, help="Triton's backend directory")
    parser.add_argument("--model-repo", type=path, required=True, help="Triton's model repository")
    parser.add_argument("--model", default=TEMPLATE_MODEL, help="model to configure (default %(default)s)")
    parser.add_argument(
        "--key", type=path, action="append", default=[], help="public key to trust; may be repeated"
    )
    parser.add_argument(
        "--host-bytes", type=positive, help="bound of the host tier (default: by free memory)"
    )
    parser.add_argument(
        "--config", type=path, help="node settings (default DEST/tensorcache/tensorcache.toml)"
    )
    parser.add_argument(
        "--replace-configs", action="store_true", help="overwrite config.pbtxt files that are there"
    )
    parser.add_argument(
        "--python-deps", action="store_true", help="install Python packages into DEST/tensorcache"
    )
    parser.add_argument(
        "--extra", choices=GPU_EXTRAS, help="with --python-deps: those of a GPU node, by its driver's CUDA"
    )
    parser.add_argument("--python", default=sys.executable, help="the Python whose version Triton's stub has")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Copy, configure, optionally install packages, then import from the destination in a fresh process."""
    if arguments.extra and not arguments.python_deps:
        raise UsageError("--extra names packages to install: it needs --python-deps")
    folder = lay_out_backend(arguments.dest)
    say(f"backend      {folder}")
    config: Path = arguments.config or folder / "tensorcache.toml"
    refused = report_kept(config, arguments) if config.exists() else ""
    for written in write_node_config(config, keys=tuple(arguments.key), host_bytes=arguments.host_bytes):
        say(f"wrote        {written}")
    for written in write_model_config(
        arguments.model_repo, arguments.model, replace=arguments.replace_configs
    ):
        say(f"configured   {written}")
    if arguments.python_deps:
        install_packages(folder, python=arguments.python, extra=arguments.extra)
    smoke_test(folder, python=arguments.python)
    say(f"import test  passed with {arguments.python}")
    if refused:
        raise RejectedError(refused)
    return 0


def report_kept(config: Path, arguments: argparse.Namespace) -> str:
    """Say what the settings that are there have otherwise; the reason why releases will be refused, or ""."""
    bound = arguments.host_bytes
    if bound is not None and (found := host_bytes_of(config)) != bound:
        wanted = "no bound" if found is None else f"bytes = {found}"
        say(f"kept         {config}: [host] has {wanted}; --host-bytes {bound} not set, edit it")
    missing = untrusted_keys(config, arguments.key)
    if not missing:
        return ""
    names = ", ".join(f"--key {key}" for key in missing)
    return f"kept {config}: {names} not added, edit its [trust] keys, or releases signed with it are refused"


def install_packages(folder: Path, *, python: str, extra: str | None = None) -> None:
    """The serving packages, at their pinned versions, beside the backend's own code."""
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--upgrade",
        "--target",
        str(folder / "site-packages"),
        "--constraint",
        str(CONSTRAINTS),
        *serving_packages(importlib.metadata.requires("tensorcache") or [], extra),
    ]
    with working("install Python packages"):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode != 0:
        raise RejectedError(f"pip failed: {_reason(done.stderr)}")


def serving_packages(required: Iterable[str], extra: str | None) -> list[str]:
    """Those that `required`, a package's own metadata, names for everybody, and those for `extra`."""
    parts = [text.partition(";") for text in required]
    named = [package.strip() for package, _, marker in parts if "extra ==" not in marker]
    more = [package.strip() for package, _, marker in parts if extra and f'extra == "{extra}"' in marker]
    if extra and not more:
        raise RejectedError(f"tensorcache as it is installed knows no extra {extra}: run `make setup`")
    return named + more


def smoke_test(folder: Path, *, python: str) -> None:
    """Import the backend from `folder`, isolated from this checkout and from PYTHONPATH."""
    command = [python, "-I", "-c", SMOKE_TEST, str(folder.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd="/")
    if done.returncode != 0:
        hint = " (try --python-deps)" if "ModuleNotFoundError" in done.stderr else ""
        raise RejectedError(f"the backend does not import from {folder}: {_reason(done.stderr)}{hint}")


def _reason(text: str) -> str:
    """The last line that tells an error, as pip and tracebacks have it; else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    told = [line for line in lines if "error" in line.lower()]
    return told[-1] if told else lines[0]
