"""What a failed command says (one line) and what it leaves behind (nothing)."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engines import generate_signing_key
from engines.decoder import Decoder
from scripts import build, keygen
from scripts.backend_layout import lay_out_backend, write_model_config
from scripts.cli import main
from scripts.errors import CommandError, DiskError, RejectedError
from scripts.node_keys import admin_key
from scripts.scratch import put_in_place, scratch_for
from tests.full_disk import REASON, room_for

SMALL = ["--model", "small", "--lanes", "1", "--max-seq-len", "64"]


TIMINGS = ".timing"  # what a plan's builder measured, kept for the next build


@pytest.fixture
def small_source(small_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """`build demo` finds the small decoder."""
    monkeypatch.setattr(build, "load_decoder", lambda source, max_seq_len: small_decoder)
    return small_decoder


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under `folder` with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err.strip()
    assert text.startswith("tensorcache: ")
    assert "\n" not in text
    return text


@pytest.mark.usefixtures("small_source")
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_a_build_on_a_full_disk_keeps_the_older_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, request: pytest.FixtureRequest
) -> None:
    if target == "tensorrt":
        request.getfixturevalue("rig")  # without a GPU the disk is not asked
    out = tmp_path / "out"
    words = ["build", "demo", "--out", str(out), *SMALL, "--target", target]
    with room_for(1000):
        assert main(words) == 1
    assert f"build of {out}: " in one_line(capsys)
    assert list(tmp_path.iterdir()) == []
    assert main(words) == 0
    before = tree(out)
    capsys.readouterr()
    with room_for(1000):
        assert main(words) == 1
    assert REASON in one_line(capsys)
    assert {path.name for path in tmp_path.iterdir()} - {TIMINGS} == {"out"}
    assert tree(out) == before
    assert main(words) == 0
    assert {path.name for path in tmp_path.iterdir()} - {TIMINGS} == {"out"}


def test_an_installation_on_a_full_disk_keeps_the_older_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = lay_out_backend(tmp_path / "backends")
    (folder / "backend" / "__init__.py").write_text("old")
    before = tree(tmp_path)
    words = ["install", "--dest", str(tmp_path / "backends"), "--model-repo", str(tmp_path / "models")]
    with room_for(1000):
        assert main(words) == 1
    assert re.search(rf"installation of {folder}: .*: {REASON}$", one_line(capsys))
    assert tree(tmp_path) == before
    assert [path.name for path in (tmp_path / "backends").iterdir()] == ["tensorcache"]


def test_configuration_files_are_whole_or_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, public = generate_signing_key(tmp_path / "mine")
    lay_out_backend(tmp_path / "backends")
    words = ["install", "--dest", str(tmp_path / "backends"), "--model-repo", str(tmp_path / "models")]
    before = tree(tmp_path)
    with room_for(10), pytest.raises(OSError, match=rf"{REASON}: '.*config\.pbtxt'"):
        write_model_config(tmp_path / "models", "small")
    assert tree(tmp_path) == before
    assert main([*words, "--key", str(public)]) == 0
    config = tmp_path / "backends" / "tensorcache" / "tensorcache.toml"
    assert config.stat().st_mode & 0o777 == 0o600


def test_the_admin_key_is_whole_or_not_there_and_never_empty(tmp_path: Path) -> None:
    file = tmp_path / "admin.key"
    with room_for(3), pytest.raises(OSError, match=REASON):
        admin_key(file)
    assert list(tmp_path.iterdir()) == []
    assert admin_key(file) == admin_key(file)
    file.write_text("\n")
    with pytest.raises(RejectedError, match="32 bytes in hex, found 1 char"):
        admin_key(file)


@pytest.mark.usefixtures("small_source")
def test_two_builds_of_one_folder_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["build", "demo", "--out", str(out), *SMALL]
    with scratch_for(out, work="build") as scratch:
        (scratch / "half").touch()
        assert main(words) == 1
        assert f"another build of {out} is running" in one_line(capsys)
        assert (scratch / "half").exists()
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_build_is_cleared_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".out.new" / "half").mkdir(parents=True)
    (tmp_path / ".out.lock").touch()
    with scratch_for(tmp_path / "out", work="build") as scratch:
        assert list(scratch.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_process_that_just_finished_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A opens the file, B finishes and removes it, A locks a file without a name, C would lock a new one."""
    lock, flock, calls = tmp_path / ".out.lock", fcntl.flock, []

    def late(handle: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            lock.unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with scratch_for(tmp_path / "out", work="build"):
        assert len(calls) == 2
        assert lock.exists()


def test_a_failed_swap_puts_the_old_folder_back(tmp_path: Path) -> None:
    target, scratch = tmp_path / "target", tmp_path / "scratch"
    for folder in (target, scratch):
        folder.mkdir()
    (target / "old").touch()
    with pytest.raises(FileNotFoundError):
        put_in_place(scratch / "missing", target, scratch=scratch)
    assert [path.name for path in target.iterdir()] == ["old"]


@pytest.mark.usefixtures("small_source")
@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["build", "demo", "--out", "/proc/x"], 1, r"build of /proc/x: .*: No such file or directory"),
        (["build", "demo", "--out", "{tmp}/x", "--model", "../x"], 2, r"model: must be 1 … 128 .*'\.\./x'"),
        (["build", "demo", "--out", "{tmp}/.x"], 2, r"model: must be 1 … 128 letters.*'\.x'"),
        (["install", "--dest", "{tmp}/file", "--model-repo", "m"], 1, r"file: Not a directory$"),
        (["keygen", "{tmp}/file"], 1, r"signing key: expected to write to .*file, found File exists"),
        (["secret", "new", "{tmp}/file"], 1, r"file: cannot be created \(File exists\)"),
        (["deploy", "m", "{tmp}", "--model-repo", "{tmp}", "--key", "{tmp}/none"], 1, r"found an unsigned"),
        (["sign", "{tmp}/none", "--key", "k"], 1, r"folder: expected a folder at .*none"),
        (["verify", "{tmp}/file/x", "--key", "k"], 1, r"folder: expected a folder at .*x"),
    ],
)  # fmt: skip
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, reason: str
) -> None:
    (tmp_path / "file").touch()
    assert main([word.replace("{tmp}", str(tmp_path)) for word in words]) == code
    assert re.search(reason, one_line(capsys))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error", "/dev/x"), RejectedError("no")])
def test_a_traceback_is_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(keygen, "run", fail)
    assert main(["keygen", "x"]) == 1
    one_line(capsys)
    assert main(["--debug", "keygen", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(keygen, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["keygen", "x"])


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(keygen, "run", interrupt)
    assert main(["keygen", "x"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_has_gone_is_no_error() -> None:
    code = "import sys; from scripts.cli import main; sys.exit(main(['secret', 'new', sys.argv[1]]))"
    reader, writer = os.pipe()
    os.close(reader)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, f"{folder}/s"],
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_of_many_files_the_first_is_named() -> None:
    failed = shutil.Error([("/a", "/b", "[Errno 28] No space left on device: '/b'"), ("/c", "/d", "x")])
    assert str(DiskError.of(failed, doing="copy")) == "copy: /b: No space left on device"
    assert isinstance(DiskError.of(OSError("odd")), CommandError)
    assert str(DiskError.of(OSError("odd"))) == "odd"


@pytest.fixture
def installed(tmp_path: Path) -> tuple[list[str], Path]:
    """The words of an installation that is there, and its settings, which trust `one`."""
    _, public = generate_signing_key(tmp_path / "one")
    words = ["install", "--dest", str(tmp_path / "b"), "--model-repo", str(tmp_path / "m")]
    assert main([*words, "--key", str(public), "--host-bytes", "1000000"]) == 0
    return words, tmp_path / "b" / "tensorcache" / "tensorcache.toml"


def test_settings_that_are_there_are_kept_aloud(
    installed: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, config = installed
    known, other = tmp_path / "one" / "release.pub", generate_signing_key(tmp_path / "two")[1]
    before = config.read_bytes()
    capsys.readouterr()
    assert main([*words, "--key", str(known), "--host-bytes", "1000000"]) == 0
    assert "kept" not in capsys.readouterr().out
    assert main([*words, "--key", str(known), "--host-bytes", "2000000"]) == 0
    assert "[host] has bytes = 1000000; --host-bytes 2000000 not set" in capsys.readouterr().out
    assert main([*words, "--key", str(known), "--key", str(other)]) == 1
    said = capsys.readouterr()
    assert f"tensorcache: kept {config}: --key {other} not added" in said.err
    assert "import test  passed" in said.out
    config.write_text("[trust\n")
    assert main([*words, "--key", str(known)]) == 2
    assert str(config) in one_line(capsys)
    config.write_bytes(before)
