"""Builds what the rig needs under build/rig, once: the stand-in libcuda, and real pycuda linked against it.

Compilers must be there; CUDA need not: its headers come from the package index, as pycuda's sources do.

    python -m tests.rig.build        # prints the folder, or what is missing on this machine

Every part lies in a folder named by the digest of its sources and versions, and appears by one rename: a run
that is killed leaves nothing half made, and one that comes meanwhile waits. The long part, pycuda, has a
digest of its own: a change of the stand-in does not build it again.
"""

import fcntl
import hashlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rig import pycuda_build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = ROOT / "build" / "rig"
SOURCES = ("libcuda.c", "memory.c", "streams.c")
OWN_HEADERS = ("standin.h", "cudaProfiler.h")


class Missing(Exception):
    """What this machine lacks to build the rig, in one line."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the built parts lie."""

    libcuda: Path
    site: Path  # holds pycuda; to be put on sys.path


def build() -> Parts:
    """The rig, built if it is not there yet. Raises Missing."""
    compiler = _compiler("cc", "CC")
    _compiler("c++", "CXX")  # asked for before the long part begins
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise Missing("no Python.h (the development package of this Python)")
    recipe = Path(pycuda_build.__file__)
    try:
        headers = _made("headers", [recipe], pycuda_build.fetch_headers)
        include = headers / pycuda_build.HEADERS_AT
        library = _made(
            "libcuda",
            [include / "cuda.h", Path(__file__), *(HERE / name for name in (*SOURCES, *OWN_HEADERS))],
            lambda folder: _build_libcuda(folder, compiler, include),
        )
        site = _made(
            "pycuda",
            [include / "cuda.h", recipe],
            lambda folder: pycuda_build.build_pycuda(folder, library, [include, HERE]),
        )
    except pycuda_build.Unavailable as error:
        raise Missing(" ".join(str(error).split())) from error
    return Parts(libcuda=library / "libcuda.so.1", site=site)


def _made(name: str, inputs: list[Path], make: Callable[[Path], None]) -> Path:
    """The folder of one part; `make` fills a folder beside it, which then takes its name."""
    digest = hashlib.sha256(f"{sys.version} {os.uname().machine}".encode())
    for path in inputs:
        digest.update(path.read_bytes())
    folder = HOME / f"{name}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be at it: one of them is enough
        if folder.is_dir():
            return folder
        making = Path(tempfile.mkdtemp(prefix=f"{name}-making-", dir=HOME))
        try:
            make(making)
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)  # gone already where it was renamed
    return folder


def _compiler(name: str, setting: str) -> str:
    found = shutil.which(os.environ.get(setting, name))
    if found is None:
        raise Missing(f"no C compiler ({name})")
    return found


def _build_libcuda(folder: Path, compiler: str, include: Path) -> None:
    stubs = folder / "stubs.c"
    declared = (include / "cuda.h").read_text() + (HERE / "cudaProfiler.h").read_text()
    stubs.write_text("\n".join(_stubs(declared)))
    pycuda_build.run(
        [
            compiler, "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared",
            f"-I{include}", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1"),
            *(str(HERE / name) for name in SOURCES), str(stubs), "-lpthread", "-ldl",
        ],
        cwd=folder,
    )  # fmt: skip
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # for the linker's -lcuda


def _stubs(header: str) -> Iterator[str]:
    """C: a weak definition of every call of the driver, and the newest form of each name."""
    versions = dict(
        re.findall(r"^\s*#define (cu\w+)\s+(cu\w+_v\d+|cuGraphInstantiateWithFlags)\s*$", header, re.M)
    )
    versions.update(re.findall(r"^\s*#define (cu\w+)\s+__CUDA_API_PT[DS][SZ]\((cu\w+)\)", header, re.M))
    names = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", header)) | set(versions.values())
    for name in sorted(names):
        yield f'__attribute__((weak, visibility("default"))) int {name}(void) {{ return 801; }}'
    yield "const char *const standin_versions[][2] = {"
    yield from (
        f'    {{"{name}", "{newest}"}},' for name, newest in sorted(versions.items()) if name != newest
    )
    yield "    {0, 0},"
    yield "};"


if __name__ == "__main__":
    try:
        print(build().libcuda.parent.parent)
    except Missing as missing:
        print(f"the GPU rig is left out: {missing}")
