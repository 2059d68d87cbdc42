"""Nothing that we start reports on anybody: ONNX Runtime would, and keeps it in the home of its user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "start",
    [
        "from backend.environment import forbid_telemetry; forbid_telemetry(); import engines.ort",
        "from scripts import cli; cli.main(['keygen', 'keys']); import engines.ort",
    ],
)
def test_no_trace_is_left_in_the_users_home(tmp_path: Path, start: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    (tmp_path / "home").mkdir()
    subprocess.run([sys.executable, "-c", start], env=environment, cwd=tmp_path, check=True, timeout=60)
    assert not list((tmp_path / "home").rglob("*"))
