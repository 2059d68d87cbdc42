"""`serve --print-flags`: what a Triton of somebody else's must be started with, as words for a shell."""

import subprocess
from pathlib import Path

import pytest

from scripts.cli import main
from scripts.node_keys import admin_key
from scripts.triton_runtime import TritonAddress, door_flags, where_flags

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    model = tmp_path / "a home" / "model_repository" / "small"
    model.mkdir(parents=True)
    (model / "config.pbtxt").touch()
    return tmp_path / "a home"


def printed(capsys: Capture, home: Path, *more: str) -> str:
    assert main(["serve", "--home", str(home), "--print-flags", *more]) == 0
    return capsys.readouterr().out


def words(text: str) -> list[str]:
    """What a shell makes of them."""
    script = f"printf '%s\\n' {' '.join(text.splitlines())}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_shell_reads_the_key_which_is_not_printed(home: Path, capsys: Capture) -> None:
    text = printed(capsys, home)
    key = admin_key(home / "admin.key")
    assert key not in text
    expected = [
        f"--model-repository={home}/model_repository", f"--backend-directory={home}/backends",
        "--model-control-mode=explicit", "--load-model=small",
        *where_flags(TritonAddress()), *door_flags(key),
    ]  # fmt: skip
    assert words(text) == expected
    assert len(text.splitlines()) == len(expected)


def test_the_key_is_printed_where_that_is_asked_for(home: Path, capsys: Capture) -> None:
    assert words(printed(capsys, home, "--with-key")) == words(printed(capsys, home))
    assert admin_key(home / "admin.key") in printed(capsys, home, "--with-key")


def test_more_flags_are_printed_too(home: Path, capsys: Capture) -> None:
    more = "--trace-config=triton,file=/tmp/a b"
    assert more in words(printed(capsys, home, f"--triton-flag={more}"))


def test_what_cannot_be_meant_is_refused(home: Path, capsys: Capture) -> None:
    assert main(["serve", "--home", str(home), "--with-key"]) == 2
    assert "--with-key goes with --print-flags" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--home", str(home), "--print-flags", "--triton-flag=log-verbose=1"])
    assert "begins with --" in capsys.readouterr().err
