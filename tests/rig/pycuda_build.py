"""Builds real pycuda, from its sdist and with the boost it brings, against the stand-in libcuda."""

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

HEADERS = "nvidia-cuda-runtime==13.0.96"
HEADERS_AT = "nvidia/cu13/include"
PYCUDA = "pycuda==2026.1"
PYCUDA_NEEDS = ("mako==1.4.3", "pytools==2026.1.1", "siphash24==1.9")  # beside what the tests have anyway
BUILD_NEEDS = ("setuptools==80.9.0", "numpy==1.26.4")
MINUTES = 15 * 60


class Unavailable(Exception):
    """The package index did not give what is needed."""


def fetch_headers(folder: Path) -> None:
    """Put the headers of CUDA below `folder`."""
    _pip("install", "--target", str(folder), "--no-deps", HEADERS)


def build_pycuda(folder: Path, library: Path, include: Sequence[Path]) -> None:
    """Fill `folder` with it, to be put on sys.path. Unoptimised: its speed is nothing to the tests."""
    with tempfile.TemporaryDirectory(prefix="pycuda-", dir=folder.parent) as work:
        tools = Path(work) / "tools"
        _pip("install", "--target", str(tools), "--no-deps", *BUILD_NEEDS)
        sources = ("--no-binary", ":all:", "--no-build-isolation", "--no-deps")
        _pip("download", *sources, "-d", work, PYCUDA, tools=tools)
        (archive,) = Path(work).glob("pycuda-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        source = archive.with_name(archive.name.removesuffix(".tar.gz"))
        run(
            [
                sys.executable, "configure.py", f"--cuda-root={include[0].parent}",
                f"--cuda-inc-dir={','.join(map(str, include))}", "--no-cuda-enable-curand",
                f"--cudadrv-lib-dir={library}",
            ],
            cwd=source,
        )  # fmt: skip
        (source / "parallel_setup.py").write_text(_PARALLEL_SETUP)
        flags = {"CFLAGS": "-O0 -g0", "PYTHONPATH": str(tools)}
        run([sys.executable, "parallel_setup.py", "bdist_wheel", "-d", work], cwd=source, environment=flags)
        (wheel,) = Path(work).glob("*.whl")
        _pip("install", "--target", str(folder), "--no-deps", str(wheel), *PYCUDA_NEEDS)


_PARALLEL_SETUP = """
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import setuptools
from distutils import ccompiler  # setuptools brings it


def compile_all(self, sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
                extra_postargs=None, depends=None):
    macros, objects, extra_postargs, pp_opts, build = self._setup_compile(
        output_dir, macros, include_dirs, sources, depends, extra_postargs)
    flags = self._get_cc_args(pp_opts, debug, extra_preargs)

    def one(name):
        if name in build:
            self._compile(name, *build[name], flags, extra_postargs, pp_opts)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(one, objects))
    return objects


ccompiler.CCompiler.compile = compile_all
sys.argv[0] = "setup.py"
sys.path.insert(0, os.getcwd())
runpy.run_path("setup.py", run_name="__main__")
"""


def _pip(verb: str, *arguments: str, tools: Path | None = None) -> None:
    environment = {} if tools is None else {"PYTHONPATH": str(tools)}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", verb, *arguments]
    try:
        run(command, cwd=Path.cwd(), environment=environment)
    except subprocess.CalledProcessError as error:
        raise Unavailable(
            f"pip {verb} {' '.join(arguments[-2:])} failed: {str(error.stdout)[-400:]}"
        ) from error


def run(command: list[str], *, cwd: Path, environment: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(
            command, cwd=cwd, check=True, text=True, timeout=MINUTES, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})},
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        error.add_note(str(error.stdout)[-4000:])
        raise
