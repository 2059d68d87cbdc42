"""What Triton shares with this process is closed to other users, and nothing else is touched."""

import logging
import stat
from pathlib import Path

import pytest

from backend.shared_region import keep_region_private


def command_line(folder: Path, *words: str) -> Path:
    path = folder / "cmdline"
    path.write_bytes("\0".join((*words, "")).encode())
    return path


def test_the_region_of_a_stub_is_closed_to_others(tmp_path: Path) -> None:
    region, other = tmp_path / "prefix_region", tmp_path / "prefix_other"
    for path in (region, other):
        path.touch()
        path.chmod(0o644)
    stub = command_line(tmp_path, "/b/triton_python_backend_stub", "/m/1/model.py", region.name, "1048576")
    keep_region_private(stub, tmp_path)
    assert stat.S_IMODE(region.stat().st_mode) == 0o600
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


def test_another_process_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o644)
    for words in (("python", "-m", file.name), ("triton_python_backend_stub",), ()):
        keep_region_private(command_line(tmp_path, *words), tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize("made", ["nothing", "link"])
def test_what_cannot_be_closed_is_said(tmp_path: Path, made: str, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "target"
    target.touch()
    target.chmod(0o644)
    if made == "link":
        (tmp_path / "region").symlink_to(target)
    with caplog.at_level(logging.WARNING):
        keep_region_private(command_line(tmp_path, "triton_python_backend_stub", "m", "region"), tmp_path)
    assert "other users of this machine may read" in caplog.text
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
