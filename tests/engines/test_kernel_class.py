"""KV of machines whose kernels round differently is kept apart."""

import re

import pytest

from engines.kernel_class import exact_here, identity_here, kernel_class

INTEL = "processor : 0\nflags\t\t: fpu avx avx2 fma avx512f\nprocessor : 1\nflags\t\t: fpu avx avx2 fma\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n"


def test_only_flags_that_choose_kernels_count_and_only_those_of_every_core() -> None:
    found = kernel_class(cpuinfo=INTEL, machine="x86_64", level2_bytes=1 << 20)
    assert re.fullmatch(r"x86_64 avx avx2 fma l2-1048576 onnxruntime-[0-9.]+", found)
    assert kernel_class(cpuinfo=ARM, machine="aarch64", level2_bytes=0).startswith(
        "aarch64 asimd asimddp i8mm l2-0 "
    )


def test_unknown_machines_have_a_class_too() -> None:
    assert kernel_class(cpuinfo="", machine="riscv64", level2_bytes=0).startswith("riscv64 l2-0 onnxruntime-")


def test_this_machine_has_one_class() -> None:
    assert kernel_class() == kernel_class()


def test_identity_is_the_builders_where_the_class_is_equal() -> None:
    assert identity_here(bytes(range(16)), built_for="a", here="a") == bytes(range(16))


def test_identity_elsewhere_depends_on_both() -> None:
    built = bytes(range(16))
    other = identity_here(built, built_for="a", here="b")
    assert len(other) == 16
    assert (
        len(
            {
                built,
                other,
                identity_here(built, built_for="a", here="c"),
                identity_here(bytes(16), built_for="a", here="b"),
            }
        )
        == 4
    )


@pytest.mark.parametrize(
    ("precision", "flags", "machine", "exact"),
    [
        ("int4", "avx avx2 fma", "x86_64", False),
        ("int4", "avx avx2 fma avx512f avx512_vnni", "x86_64", True),
        ("int8", "avx avx2 fma", "x86_64", True),
        ("fp32", "avx avx2 fma", "x86_64", True),
        ("int4", "asimd asimddp", "aarch64", True),
    ],
)
def test_four_bits_are_exact_only_where_that_was_measured(
    precision: str, flags: str, machine: str, exact: bool
) -> None:
    key = "flags" if machine == "x86_64" else "Features"
    assert exact_here(precision, cpuinfo=f"{key}\t: {flags}\n", machine=machine) is exact
