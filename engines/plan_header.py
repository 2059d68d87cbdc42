"""Reads the 32 bytes that a TensorRT plan begins with, and refuses a plan that cannot run here.

TensorRT answers a plan it cannot use with nothing but a line in its log. So everything that a person can act
on is compared here first, one refusal a step:

    plan                 the file begins as a plan of TensorRT does
    plan size            it is as long as its header says
    library version      the plan, the manifest and the library that runs are of one version
    compute capability   the GPU is of the architecture that the kernels were compiled for
    gpu                  it is the very model of GPU that the kernels were chosen on

A plan runs only under the library version that wrote it (that is TensorRT's own rule; we build no
version-compatible plans, which would be slower and drag a second runtime along). On another GPU of the same
compute capability TensorRT would run it and warn that it is likely to be slow or to fail, because its kernels
were timed on the memory and the number of multiprocessors of the GPU that built it: such a plan is refused,
unless it was built for every GPU of its compute capability (`TensorRTInfo.built_for`).
"""

import struct
from dataclasses import dataclass

from engines.errors import ReleaseError
from engines.manifest import EngineManifest, TensorRTInfo

HEADER_BYTES = 32
MAGIC = b"ftrt"

_HEADER = struct.Struct("<4sIqqBBBB4s")  # magic, padding, entries, size, version × 4, platform tag
_RTX_MAGIC = b"vtrt"
_KINDS = {
    _RTX_MAGIC: "a plan for TensorRT-RTX, which TensorRT cannot run (build it with TensorRT)",
    b"\x89PNG": "a PNG image",
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a ZIP archive",
    b"vers": "a pointer of Git LFS, whose file was never fetched",
}
_LEAST_PARTS = 3
_LONGEST_NUMBER = 9
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What a plan says about itself. The compute capability is not in it: the manifest keeps it."""

    size: int
    version: tuple[int, int, int, int]

    @property
    def library(self) -> str:
        """The version of the library that wrote the plan, such as "10.16.0.72"."""
        return ".".join(map(str, self.version))


def parse_plan_header(plan: memoryview) -> PlanHeader:
    """Read the header of a whole plan; ReleaseError (steps "plan", "plan size") if it cannot be one."""
    if len(plan) < HEADER_BYTES or bytes(plan[:4]) != MAGIC:
        raise ReleaseError("plan", expected=f"a TensorRT plan (it begins with {MAGIC!r})", found=_kind(plan))
    _, _, _, size, *version, _ = _HEADER.unpack_from(plan)
    if size != len(plan):
        raise ReleaseError(
            "plan size", expected=f"{size} bytes, as its header says", found=f"{len(plan)} bytes{_hint(plan)}"
        )
    major, minor, patch, build = version
    return PlanHeader(size=size, version=(major, minor, patch, build))


def check_plan(
    manifest: EngineManifest, plan: memoryview, *, library: str, compute_capability: str, gpu_name: str
) -> None:
    """Refuse with ReleaseError, step by step, a plan that cannot run under `library` on this GPU.

    `library` is the running TensorRT's version ("10.16.0.72"; its last part may be missing),
    `compute_capability` is written "9.0", `gpu_name` as the driver tells it.
    """
    built = _built(manifest)
    header = parse_plan_header(plan)
    _check_version(built, header, library=library)
    if built.compute_capability != compute_capability:
        raise ReleaseError(
            "compute capability",
            expected=f"a GPU of {built.compute_capability}, which the plan was built for",
            found=f"{gpu_name} of {compute_capability}",
        )
    if built.built_for == "gpu" and built.gpu_name != gpu_name:
        raise ReleaseError(
            "gpu",
            expected=f"{built.gpu_name}, which the plan was built on (or a build with --plan-for capability)",
            found=gpu_name,
        )


def _built(manifest: EngineManifest) -> TensorRTInfo:
    if manifest.runtime != "tensorrt" or manifest.tensorrt is None:
        found = manifest.runtime if manifest.runtime != "tensorrt" else "no `tensorrt` in engine.json"
        raise ReleaseError(
            "manifest", expected="a release for tensorrt and what its plan is bound to", found=found
        )
    return manifest.tensorrt


def _check_version(built: TensorRTInfo, header: PlanHeader, *, library: str) -> None:
    if not _tells(built.version, header.version):
        raise ReleaseError(
            "library version",
            expected=f"a plan of TensorRT {built.version}, as engine.json says",
            found=f"one of {header.library}",
        )
    if not _tells(library, header.version):
        raise ReleaseError(
            "library version",
            expected=f"TensorRT {header.library}, which built the plan (or build the release again)",
            found=f"TensorRT {library}",
        )


def _tells(text: str, version: tuple[int, int, int, int]) -> bool:
    """Is `text` this version? Some builds of the library do not tell their build number."""
    numbers: list[int] = []
    for part in text.split(".")[: len(version)]:
        if not (part.isascii() and part.isdigit() and len(part) <= _LONGEST_NUMBER):
            break
        numbers.append(int(part) & 0xFF)  # a header has one byte for each
    return len(numbers) >= _LEAST_PARTS and tuple(numbers) == version[: len(numbers)]


def _kind(plan: memoryview) -> str:
    """What the file is, for a person who put the wrong one there."""
    if len(plan) == 0:
        return "an empty file"
    start = bytes(plan[:4])
    if start == MAGIC:
        return f"its first {len(plan)} bytes"
    return _KINDS.get(start, f"one that begins with {start!r}")


def _hint(plan: memoryview) -> str:
    """A copy in text mode turns every LF into CR LF: longer, and no LF without its CR."""
    sample = bytes(plan[:_SAMPLE_BYTES])
    feeds = sample.count(b"\n")
    mangled = feeds > 1 and feeds == sample.count(b"\r\n")
    return " with CR before every LF: it was copied as text" if mangled else ""
