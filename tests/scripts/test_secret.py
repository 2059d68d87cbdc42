"""`tensorcache secret`: what an operator types to make, rotate, list and prune secrets, and what is said."""

import os
import re
import time
from pathlib import Path

import pytest

from cachemgr import CacheSecrets
from scripts.cli import main

DAY_S = 86_400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "secrets"
    assert main(["secret", "new", str(made)]) == 0
    return made


def rotate(folder: Path, *, days_ago: float = 0) -> None:
    assert main(["secret", "new", str(folder), "--rotate"]) == 0
    moment = time.time() - days_ago * DAY_S
    os.utime(max(folder.glob("tag-*.key")), (moment, moment))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["secret", *arguments]) == status
    return capsys.readouterr().out


def test_new_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "secrets"
    first = said(capsys, "new", str(folder))
    assert f'[secrets] dir = "{folder}"' in first
    assert "secret_group" not in first
    assert "nothing" in said(capsys, "new", str(folder))
    rotated = said(capsys, "new", str(folder), "--rotate")
    assert "copy tag-2.key to the folder of every other node" in rotated
    assert f"tensorcache secret prune {folder}" in rotated


def test_list_shows_each_key_and_no_value(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rotate(folder, days_ago=1.5)
    rotate(folder, days_ago=0.5)
    shown = said(capsys, "list", str(folder))
    states = [line.split("│")[1:4:2] for line in shown.splitlines() if line.startswith("│")]
    assert [(key_id.strip(), state.strip()) for key_id, state in states] == [
        ("1", "expired"), ("2", "read for 12.0 hours"), ("3", "seals")
    ]  # fmt: skip
    longer = said(capsys, "list", str(folder), "--grace-s", str(2 * DAY_S))
    assert re.search(r"│ 1 .*read for 12\.0 hours", longer)
    for path in folder.iterdir():
        assert path.read_text().strip() not in shown


def test_list_names_what_cannot_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tag-2.key").touch(mode=0o600)
    shown = said(capsys, "list", str(folder), status=1)
    assert re.search(r"│ 1 .*seals", shown)
    assert re.search(r"│ 2 .*cannot be used", shown)
    assert "tag-2.key: expected 32 bytes in hex, found an empty file" in shown
    (folder / "tag-2.key").unlink()
    (folder / "tag-1.key").unlink()
    assert "seals" not in said(capsys, "list", str(folder), status=1)


def test_prune_removes_what_is_expired_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing" in said(capsys, "prune", str(folder))
    rotate(folder, days_ago=1.5)
    rotate(folder)
    assert "tag-1.key" in said(capsys, "prune", str(folder))
    assert names(folder) == ["naming.key", "tag-2.key", "tag-3.key"]
    assert "tag-2.key" in said(capsys, "prune", str(folder), "--grace-s", "0")
    assert "nothing" in said(capsys, "prune", str(folder), "--grace-s", "0")
    assert names(folder) == ["naming.key", "tag-3.key"]
    assert CacheSecrets.load(folder).sealing_key_id == 3


def test_a_group_is_checked_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["secret", "new", str(tmp_path / "secrets"), "--group", "no-such-group"]) == 1
    assert "this machine has no group 'no-such-group'" in capsys.readouterr().err
    assert not (tmp_path / "secrets").exists()


@pytest.mark.parametrize("grace", ["-1", "soon", "1e9", "nan"])
def test_a_grace_that_no_node_may_have_is_refused(folder: Path, grace: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["secret", "prune", str(folder), "--grace-s", grace])
    assert names(folder) == ["naming.key", "tag-1.key"]
