"""The first bytes of a plan: what cannot run here is refused by name before TensorRT sees it."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import ReleaseError
from engines.manifest import EngineManifest, TensorRTInfo, encode_manifest, parse_manifest
from engines.plan_header import HEADER_BYTES, check_plan, parse_plan_header
from tests.engines.conftest import TINY_FILES, refusal, tiny_manifest

H100 = "NVIDIA H100 80GB HBM3"
INFO = TensorRTInfo(version="10.16.0.72", compute_capability="9.0", gpu_name=H100, profiles=())
MANIFEST = tiny_manifest(TINY_FILES, runtime="tensorrt", tensorrt=INFO)
HERE = {"library": "10.16.0.72", "compute_capability": "9.0", "gpu_name": H100}


def plan_of(
    *, magic: bytes = b"ftrt", version: tuple[int, ...] = (10, 16, 0, 72), body: bytes = b"\n\0" * 300
) -> bytes:
    header = struct.pack("<4sIqqBBBB4s", magic, 0, 2, HEADER_BYTES + len(body), *version, magic)
    return header + body


PLAN = plan_of()


def check(plan: bytes = PLAN, *, manifest: EngineManifest = MANIFEST, **here: str) -> None:
    check_plan(manifest, memoryview(plan), **(HERE | here))


def bound_to(**changes: Any) -> EngineManifest:
    return msgspec.structs.replace(MANIFEST, tensorrt=msgspec.structs.replace(INFO, **changes))


def test_a_plan_that_fits_is_let_through() -> None:
    check()
    assert parse_plan_header(memoryview(PLAN)).library == "10.16.0.72"


@pytest.mark.parametrize(
    ("plan", "step", "found"),
    [
        (b"", "plan", "an empty file"),
        (PLAN[:31], "plan", "its first 31 bytes"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "plan", "a PNG image"),
        (bytes([PLAN[0] ^ 1]) + PLAN[1:], "plan", "one that begins with b'gtrt'"),
        (plan_of(magic=b"vtrt"), "plan", "a plan for TensorRT-RTX"),
        (b"version https://git-lfs.github.com/spec/v1\n", "plan", "a pointer of Git LFS"),
        (PLAN[:-1], "plan size", "631 bytes"),
        (PLAN + b"\0", "plan size", "633 bytes"),
        (
            PLAN.replace(b"\n", b"\r\n"),
            "plan size",
            "933 bytes with CR before every LF: it was copied as text",
        ),
        (plan_of(version=(10, 16, 0, 71)), "library version", "one of 10.16.0.71"),
    ],
)
def test_what_is_no_such_plan_is_named(plan: bytes, step: str, found: str) -> None:
    error = refusal(lambda: check(plan))
    assert error.step == step
    assert found in error.found


@pytest.mark.parametrize(
    ("here", "step", "expected", "found"),
    [
        (
            {"library": "10.16.1.11"},
            "library version",
            "TensorRT 10.16.0.72, which built",
            "TensorRT 10.16.1.11",
        ),
        ({"library": "10.16.0.73"}, "library version", "TensorRT 10.16.0.72", "TensorRT 10.16.0.73"),
        ({"library": "10.16"}, "library version", "TensorRT 10.16.0.72", "TensorRT 10.16"),
        (
            {"compute_capability": "8.0", "gpu_name": "NVIDIA A100"},
            "compute capability",
            "a GPU of 9.0",
            "A100 of 8.0",
        ),
        ({"gpu_name": "NVIDIA H200"}, "gpu", H100, "NVIDIA H200"),
    ],
)
def test_a_machine_the_plan_was_not_built_for_is_named(
    here: dict[str, str], step: str, expected: str, found: str
) -> None:
    error = refusal(lambda: check(**here))
    assert error.step == step
    assert expected in error.expected
    assert found in error.found


def test_a_library_that_does_not_tell_its_build_number_is_compared_without_it() -> None:
    check(library="10.16.0")
    check(library="10.16.0.72.post1")


def test_a_plan_for_a_whole_compute_capability_runs_on_another_gpu_of_it() -> None:
    manifest = bound_to(built_for="capability")
    check(manifest=manifest, gpu_name="NVIDIA H200")
    assert refusal(lambda: check(manifest=manifest, compute_capability="8.0")).step == "compute capability"


def test_a_manifest_that_says_otherwise_than_the_plan_is_refused() -> None:
    error = refusal(lambda: check(manifest=bound_to(version="10.16.0.71")))
    assert (error.step, error.found) == ("library version", "one of 10.16.0.72")


def test_a_release_for_another_runtime_has_no_plan() -> None:
    for manifest in (tiny_manifest(TINY_FILES), msgspec.structs.replace(MANIFEST, tensorrt=None)):
        assert refusal(lambda manifest=manifest: check(manifest=manifest)).step == "manifest"


def test_the_manifest_keeps_what_a_plan_is_bound_to() -> None:
    assert parse_manifest(encode_manifest(MANIFEST)) == MANIFEST
    for wrong in ({"version": "10"}, {"compute_capability": "sm_90"}, {"built_for": "any"}):
        with pytest.raises(ReleaseError, match="manifest"):
            parse_manifest(encode_manifest(bound_to(**wrong)))


@given(at=st.integers(0, 3) | st.integers(16, 27), value=st.integers(0, 255))
@settings(deadline=None)
def test_any_byte_of_magic_size_or_version_counts(at: int, value: int) -> None:
    changed = bytearray(PLAN)
    changed[at] = value
    if bytes(changed) == PLAN:
        check(bytes(changed))
    else:
        assert refusal(lambda: check(bytes(changed))).step in ("plan", "plan size", "library version")


@given(
    start=st.binary(max_size=HEADER_BYTES + 8),
    magic=st.sampled_from([b"", b"ftrt"]),
    library=st.text(max_size=12),
)
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_refused_and_nothing_worse(start: bytes, magic: bytes, library: str) -> None:
    assert refusal(lambda: check(magic + start, library=library)).step in (
        "plan",
        "plan size",
        "library version",
    )
