"""Parts of the rig are made once, whole or not at all, whoever else makes them at the same time."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig import build

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "rig"
    monkeypatch.setattr(build, "HOME", folder)
    return folder


def part(make: Callable[[Path], None], *inputs: Path) -> Path:
    return build._made("part", list(inputs), make)


def test_a_part_is_made_once_by_two_at_a_time() -> None:
    made, folders = [], []
    both = threading.Barrier(2, timeout=DEADLINE_S)

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("whole")

    def run() -> None:
        both.wait()
        folders.append(part(make))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(made) == 1
    assert folders[0] == folders[1]
    assert (folders[0] / "file").read_text() == "whole"


def test_a_part_that_fails_leaves_nothing(home: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("h")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        part(fail)
    assert [path for path in home.iterdir() if path.is_dir()] == []
    assert part(lambda folder: None).is_dir()


def test_another_source_is_another_part(tmp_path: Path) -> None:
    source = tmp_path / "source.c"
    source.write_text("one")
    one = part(lambda folder: None, source)
    source.write_text("two")
    assert part(lambda folder: None, source) != one


def test_what_is_missing_is_said_in_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(folder: Path) -> None:
        raise build.pycuda_build.Unavailable("pip failed:\n  no index\n")

    monkeypatch.setattr(build.pycuda_build, "fetch_headers", unreachable)
    with pytest.raises(build.Missing, match=r"^pip failed: no index$"):
        build.build()
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(build.Missing, match=r"^no C compiler \(cc\)$"):
        build.build()
