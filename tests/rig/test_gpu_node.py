"""The tests of a GPU node seen from elsewhere: one line of why, their order, what is missing said plainly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.sanitizer import MISSING, find_sanitizer, memcheck

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}  # also where there is one


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=WITHOUT_GPU, capture_output=True, text=True, timeout=120
    )


def test_other_runs_say_in_one_line_why_they_are_left_out() -> None:
    done = run("pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")
    assert done.returncode == 0, done.stdout
    said = [line for line in done.stdout.splitlines() if "SKIPPED" in line]
    assert len(said) == 1
    assert said[0].endswith("need an NVIDIA GPU: run `make test-gpu` there")


def test_they_run_in_the_promised_order_each_in_every_precision() -> None:
    done = run("pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests/gpu", "--gpu")
    found = [line for line in done.stdout.splitlines() if "::" in line]
    numbers = [int(line.split("/test_")[1][:2]) for line in found]
    lanes, graphs, sampling, swaps = [4] * 4, [6] * 2, [6] * 8, [9] * 2
    assert numbers == [0, 1, 1, 2, 2, 3, 3, *lanes, 5, 5, *graphs, *sampling, *swaps, 10, 10]
    both = found[1 : numbers.index(9)]
    assert all("[float16]" in a and "[bfloat16]" in b for a, b in zip(both[::2], both[1::2], strict=True))


def test_asked_for_without_a_gpu_the_first_one_fails_and_stops_the_rest() -> None:
    done = run("pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu", "--gpu")
    assert done.returncode == 1
    assert "1 failed in" in done.stdout
    assert "DeviceError" in done.stdout


@pytest.mark.parametrize("flags", [["--driver"], []])
def test_readiness_is_refused_in_one_line(flags: list[str]) -> None:
    done = run("scripts.bench.gpu_ready", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("tensorcache: this needs a GPU node: driver: expected")
    assert "gpu-cu13" in line or "--gpus all" in line


# -- compute-sanitizer --


def sanitizer(folder: Path, *lines: str, code: int = 0) -> Path:
    """A stand-in that notes how it was called and says `lines`."""
    tool = folder / "compute-sanitizer"
    said = "\n".join(f"echo '{line}'" for line in lines)
    tool.write_text(f'#!/bin/sh\necho "$@" >"{folder}/called"\n{said}\nexit {code}\n')
    tool.chmod(0o755)
    return tool


def test_without_the_tool_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        find_sanitizer(tmp_path, path=str(tmp_path))
    assert str(failed.value) == MISSING
    assert "install" in MISSING


def test_the_tool_is_found_on_the_path_and_else_in_the_newest_toolkit(tmp_path: Path) -> None:
    for version in ("cuda-12.9", "cuda-13.0"):
        (tmp_path / version / "bin").mkdir(parents=True)
        sanitizer(tmp_path / version / "bin")
    assert find_sanitizer(tmp_path, path="") == tmp_path / "cuda-13.0" / "bin" / "compute-sanitizer"
    older = tmp_path / "cuda-12.9" / "bin"
    assert find_sanitizer(tmp_path, path=str(older)) == older / "compute-sanitizer"


def test_a_clean_program_gives_the_tools_summary(tmp_path: Path) -> None:
    tool = sanitizer(tmp_path, "========= COMPUTE-SANITIZER", "========= ERROR SUMMARY: 0 errors")
    assert memcheck(tool, ["python", "steps.py"]) == "ERROR SUMMARY: 0 errors"
    called = (tmp_path / "called").read_text()
    assert called.startswith("--tool memcheck ")
    assert called.endswith("--error-exitcode 86 python steps.py\n")


@pytest.mark.parametrize(
    ("lines", "code", "complaint"),
    [
        (
            ["========= Invalid __global__ read of size 2 bytes", "========= ERROR SUMMARY: 1 error"],
            86,
            "Invalid",
        ),
        (["Traceback: no such release"], 1, "no such release"),
        (["twenty steps done"], 0, "no summary"),
    ],
)
def test_errors_a_dying_program_and_a_silent_tool_fail(
    tmp_path: Path, lines: list[str], code: int, complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        memcheck(sanitizer(tmp_path, *lines, code=code), ["python", "steps.py"])
