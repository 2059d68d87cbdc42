"""The coverage-guided runner: a target is run under it, and what crashes is kept with what replays it."""

import importlib.util
import subprocess
import sys

import pytest

from tests.fuzz.run import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed: no wheel for this Python"
)


def fuzz(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.fuzz.run", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_target_under_atheris() -> None:
    done = fuzz("plan_header", "--seconds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plan_header: Done" in done.stdout
