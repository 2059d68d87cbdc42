"""The coverage-guided runner: a target is run under it, and what crashes is kept with what replays it."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from tests.fuzz.run import BUILT, ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed: no wheel for this Python"
)


def fuzz(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.fuzz.run", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_target_under_atheris() -> None:
    done = fuzz("plan_header", "--seconds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plan_header: Done" in done.stdout


def test_a_crash_is_kept_and_can_be_replayed() -> None:
    name = "tests.fuzz.crashing"
    try:
        done = fuzz(name, "--seconds", "20")
        assert done.returncode == 1, done.stdout + done.stderr
        (kept,) = (BUILT / name).glob("crash-*")
        replay = f"-m tests.fuzz.run {name} --replay {kept.relative_to(ROOT)}"
        assert replay in done.stdout
        again = fuzz(*replay.split()[2:])
        assert again.returncode == 1
        assert "AssertionError: found" in again.stderr
    finally:
        shutil.rmtree(BUILT / name, ignore_errors=True)


def test_an_unknown_target_is_refused() -> None:
    done = fuzz("none")
    assert done.returncode == 2
    assert "there is no target 'none'" in done.stderr
