"""What a node remembers of the ring: whole, old or new, whatever dies; anything else is nothing."""

import contextlib
import json
import logging
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cachemgr.ring import KeptRings, ReplacedRing, RingError, RingFile, add_node, first_state
from tests import full_disk
from tests.cachemgr.ring.rings import spec

FIRST = first_state([spec("a"), spec("b")], replicas=1)
OLD = KeptRings(FIRST, (), 0.0, True)
NEW = KeptRings(
    add_node(FIRST, spec("c")), (ReplacedRing(FIRST, 1_700_000_000.5),), 1_700_000_000.5, False
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster" / "ring.json"


@pytest.mark.parametrize("kept", [OLD, NEW])
def test_what_is_saved_is_loaded(path: Path, kept: KeptRings) -> None:
    RingFile(path).save(kept)
    assert RingFile(path).load() == kept
    assert RingFile(str(path)).load() == kept


def test_the_last_one_counts_and_nothing_else_is_left(path: Path) -> None:
    file = RingFile(path)
    for kept in (NEW, OLD, NEW):
        file.save(kept)
    assert file.load() == NEW
    assert [entry.name for entry in path.parent.iterdir()] == ["ring.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_kept_yet(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert RingFile(path).load() is None
    assert caplog.messages == [f"{path}: no ring is kept yet"]


def content() -> bytes:
    return msgspec.json.encode(NEW, order="sorted")


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\0" * 4096,
        content()[:-1],
        content()[: len(content()) // 2],
        content() + b"}",
        content().replace(b'"replicas":1', b'"replicas":7'),
        content().replace(b'"weight":1.0', b'"weight":-1'),
        content().replace(b"1700000000.5", b"1e999"),
        content().replace(b"1700000000.5", b"NaN"),
        content().replace(b'"pulled":false', b'"pulled":0'),
        content().replace(b'"pulled":false', b'"pulled":false,"more":1'),
        b"[" * 100_000,
        b'{"current":' * 100_000,
        b"\xff\xd8\xff garbage",
    ],
    ids=range(14),
)
def test_a_damaged_file_is_as_good_as_none(
    path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(damaged)
    assert RingFile(path).load() is None
    [said] = caplog.messages
    assert said.startswith(f"{path}: not a kept ring, ignored (")
    RingFile(path).save(NEW)
    assert RingFile(path).load() == NEW


def test_a_torn_file_at_every_length(path: Path) -> None:
    path.parent.mkdir()
    whole = content()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert RingFile(path).load() is None


def too_long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it whole would end the process


def make_link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(content())
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (too_long, "ring file: must be at most 20972544 bytes, got 1099511627776"),
        (make_link, "symbolic links"),
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "ring file: must be a regular file"),
    ],
    ids=["too long", "link", "folder", "pipe"],
)
def test_what_is_no_file_of_ours_is_not_read(
    path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], why: str
) -> None:
    path.parent.mkdir()
    make(path)
    assert RingFile(path).load() is None
    [said] = caplog.messages
    assert why in said


def test_a_full_disk_keeps_what_was_kept(path: Path) -> None:
    file = RingFile(path)
    file.save(OLD)
    with full_disk.room_for(100), pytest.raises(RingError) as refused:
        file.save(NEW)
    assert str(refused.value).startswith(f"ring file: cannot be written ({full_disk.REASON}), got '/")
    assert file.load() == OLD
    assert [entry.name for entry in path.parent.iterdir()] == ["ring.json"]
    file.save(NEW)
    assert file.load() == NEW


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cluster").write_text("a file")
    with pytest.raises(RingError, match="ring file: cannot be written"):
        RingFile(tmp_path / "cluster" / "ring.json").save(OLD)
    assert RingFile(tmp_path / "cluster" / "ring.json").load() is None


def killed_at(step: str, call: int, path: Path) -> None:
    """Another process saves NEW and is killed when it calls `os.<step>` for the `call`th time."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            calls = iter(range(1000))

            def die(*_: object, **__: object) -> None:
                if next(calls) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(*_, **__)  # type: ignore[operator]

            real = getattr(os, step)
            setattr(os, step, die)
            RingFile(path).save(NEW)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("step", "call", "kept"),
    [("fsync", 0, OLD), ("rename", 0, OLD), ("fsync", 1, NEW)],
    ids=["written", "about to be renamed", "renamed"],
)
def test_killed_while_saving(path: Path, step: str, call: int, kept: KeptRings) -> None:
    RingFile(path).save(OLD)
    killed_at(step, call, path)
    left = sorted(entry.name for entry in path.parent.iterdir())
    assert len(left) == (2 if kept is OLD else 1)
    assert RingFile(path).load() == kept
    assert sorted(entry.name for entry in path.parent.iterdir()) == left, "a reader deletes nothing"
    RingFile(path).save(NEW)
    assert [entry.name for entry in path.parent.iterdir()] == ["ring.json"]


def test_killed_at_any_moment_of_saving_again_and_again(path: Path) -> None:
    for turn in range(25):
        RingFile(path).save(OLD)
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.write(told, b".")
                while True:
                    RingFile(path).save(NEW)
                    RingFile(path).save(OLD)
            os._exit(1)
        os.read(ready, 1)
        for _ in range(turn * 500):  # a little later each time
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
        json.loads(path.read_bytes())
        assert RingFile(path).load() in (OLD, NEW)
