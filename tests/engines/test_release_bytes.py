"""A release's bytes: altered, cut, replaced while they are read; and what it says about itself."""

import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines import loading
from engines.errors import ReleaseError
from engines.loading import load_release, load_release_dir
from engines.trust import TrustSettings
from tests.engines.conftest import TINY_FILES, Keys, refusal
from tests.resident_memory import resident_bytes

WriteRelease = Callable[..., Path]


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_altered_byte_is_refused(served: Path, load: Callable[[], object], name: str, where: str) -> None:
    content = bytearray((served / name).read_bytes())
    content[{"first": 0, "middle": len(content) // 2, "last": -1}[where]] ^= 1
    (served / name).write_bytes(content)
    error = refusal(load)
    assert error.step == "digest"
    assert name in error.expected
    assert re.search("[0-9a-f]{64}", error.expected)
    assert error.found == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + bytes(32)], ids=["empty", "png"])
def test_other_content_is_refused(
    served: Path, load: Callable[[], object], name: str, content: bytes
) -> None:
    (served / name).write_bytes(content)
    assert name in refusal(load).expected


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
def test_a_truncated_or_longer_file_is_refused(served: Path, load: Callable[[], object], name: str) -> None:
    whole = (served / name).read_bytes()
    for content in (whole[:-1], whole + b"\0", whole * 2):
        (served / name).write_bytes(content)
        assert name in refusal(load).expected


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 7])
def test_a_file_of_any_size_loads_whole(write_release: WriteRelease, keys: Keys, size: int) -> None:
    content = hashlib.shake_256(b"large").digest(size)
    release = load_release_dir(write_release(files=TINY_FILES | {"zz.data": content}), trust=keys.trust)
    assert bytes(release.files["zz.data"]) == content


@pytest.mark.parametrize("at", [0, (1 << 20) - 1, 1 << 20, 2 << 20, (3 << 20) + 6])
def test_one_altered_byte_of_a_large_file_is_refused(
    write_release: WriteRelease, keys: Keys, at: int
) -> None:
    content = bytearray((3 << 20) + 7)
    folder = write_release(files=TINY_FILES | {"zz.data": bytes(content)})
    content[at] = 1
    (folder / "zz.data").write_bytes(content)
    assert refusal(lambda: load_release_dir(folder, trust=keys.trust)).step == "digest"


def test_a_disk_that_fails_halfway_is_a_refusal_that_keeps_nothing(
    write_release: WriteRelease, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_release(files=TINY_FILES | {"zz.data": bytes(3 << 20)})
    readv, calls = os.readv, []

    def failing(fd: int, buffers: Any) -> int:
        calls.append(len(buffers[0]))
        if calls[-2:] == [1 << 20, 1 << 20]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", failing)
    error = refusal(lambda: load_release_dir(folder, trust=keys.trust))
    assert (error.step, error.found) == ("files", "Input/output error")
    assert error.__context__ is None  # its frames would hold the buffers


def test_a_manifest_with_carriage_returns_is_refused(served: Path, load: Callable[[], object]) -> None:
    manifest = served / "engine.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"\n", b"\r\n"))
    error = refusal(load)
    assert error.step == "digest"
    assert "engine.json" in error.expected


def test_a_sparse_file_of_another_size_is_not_read(served: Path, load: Callable[[], object]) -> None:
    with (served / "model.onnx.data").open("r+b") as file:
        file.truncate(1 << 42)
    error = refusal(load)
    assert error.expected == f"{len(TINY_FILES['model.onnx.data'])} bytes in model.onnx.data"
    assert error.found == f"{1 << 42} bytes"


def test_a_release_in_a_folder_of_another_name_is_refused(
    version: Path, served: Path, load: Callable[[], object]
) -> None:
    served.rename(served.with_name("b" * 64))
    (version / "current").write_text("b" * 64 + "\n")
    error = refusal(load)
    assert error.step == "digest"
    assert error.expected == "release " + "b" * 64
    assert error.found.startswith(served.name)


def test_another_model_is_refused(version: Path, keys: Keys) -> None:
    error = refusal(lambda: load_release(version, model="huge", trust=keys.trust))
    assert (error.step, error.expected, error.found) == ("model", "a release for 'huge'", "one for 'tiny'")


def test_an_older_release_than_trusted_is_refused_before_it_is_read(
    version: Path, served: Path, keys: Keys
) -> None:
    (served / "model.onnx.data").write_bytes(b"not even looked at")
    trust = TrustSettings(keys=(keys.public,), min_release={"tiny": 4, "huge": 1})
    error = refusal(lambda: load_release(version, model="tiny", trust=trust))
    assert (error.step, error.expected, error.found) == ("min_release", "release 4 or later of 'tiny'", "3")


def test_the_least_trusted_release_loads(version: Path, keys: Keys) -> None:
    trust = TrustSettings(keys=(keys.public,), min_release={"tiny": 3, "huge": 9})
    assert load_release(version, model="tiny", trust=trust).manifest.release == 3


def test_too_little_memory_is_refused_before_it_is_read(version: Path, served: Path, keys: Keys) -> None:
    (served / "model.onnx.data").write_bytes(b"not even looked at")
    need = sum(map(len, TINY_FILES.values()))
    error = refusal(lambda: load_release(version, model="tiny", trust=keys.trust, available=lambda: need - 1))
    assert error.step == "memory"
    assert f"{need} bytes" in error.expected
    assert error.found == f"{need - 1} bytes"


def test_a_tokenizer_that_the_kv_was_not_made_for_is_refused(write_release: WriteRelease, keys: Keys) -> None:
    folder = write_release(tokenizer_digest="0" * 64)
    error = refusal(lambda: load_release_dir(folder, trust=keys.trust))
    assert error.step == "tokenizer"


@pytest.mark.parametrize("name", ["tokenizer.json", "model.onnx"])
def test_a_release_without_a_needed_file_is_refused(
    write_release: WriteRelease, keys: Keys, name: str
) -> None:
    folder = write_release(files={file: data for file, data in TINY_FILES.items() if file != name})
    error = refusal(lambda: load_release_dir(folder, trust=keys.trust))
    assert error.step == "manifest"
    assert name in error.expected


def test_a_file_replaced_after_loading_changes_nothing(version: Path, served: Path, keys: Keys) -> None:
    release = load_release(version, model="tiny", trust=keys.trust)
    for path in served.iterdir():
        path.write_bytes(b"evil" * 1000)
    for name, content in TINY_FILES.items():
        assert bytes(release.files[name]) == content


@pytest.mark.parametrize("how", ["replaced", "overwritten", "linked"])
def test_a_file_replaced_between_check_and_use_is_caught(
    served: Path, load: Callable[[], object], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker strikes after listing and signature were checked, just before the file is opened."""
    target, evil = served / "model.onnx.data", served.parent / "evil"
    evil.write_bytes(b"x" * len(TINY_FILES["model.onnx.data"]))
    require_memory = loading.require_memory

    def strike(*args: Any, **kwargs: Any) -> None:
        require_memory(*args, **kwargs)
        if how == "replaced":
            os.replace(evil, target)
        elif how == "overwritten":
            target.write_bytes(evil.read_bytes())
        else:
            target.unlink()
            target.symlink_to(evil)

    monkeypatch.setattr(loading, "require_memory", strike)
    assert refusal(load).step == ("files" if how == "linked" else "digest")


def test_a_file_that_flips_all_the_time_loads_right_or_not_at_all(
    version: Path, served: Path, keys: Keys
) -> None:
    target, scratch = served / "model.onnx.data", version / "scratch"
    good = TINY_FILES["model.onnx.data"]
    stop = threading.Event()

    def flip() -> None:
        contents = [b"y" * len(good), good]
        turn = 0
        while not stop.is_set():
            scratch.write_bytes(contents[turn % 2])
            os.replace(scratch, target)
            with target.open("r+b") as file:  # in place, too
                file.write(contents[turn % 2][: len(good) // 2])
            turn += 1

    attacker = threading.Thread(target=flip)
    attacker.start()
    outcomes = set()
    try:
        for _ in range(150):
            try:
                release = load_release(version, model="tiny", trust=keys.trust)
            except ReleaseError as error:
                outcomes.add(error.step)
            else:
                assert bytes(release.files["model.onnx.data"]) == good
                outcomes.add("loaded")
    finally:
        stop.set()
        attacker.join()
    assert outcomes <= {"loaded", "digest", "files"}
    assert "digest" in outcomes


def test_fifty_failed_loads_leak_neither_files_nor_memory(write_release: WriteRelease, keys: Keys) -> None:
    files = TINY_FILES | {"zz.data": bytes(16 << 20)}  # the last one is read in full, then refused
    folder = write_release(files=files)
    (folder / "zz.data").write_bytes(b"\1" + bytes((16 << 20) - 1))

    def fail() -> None:
        assert refusal(lambda: load_release_dir(folder, trust=keys.trust)).step == "digest"

    fail()
    fds, memory = len(os.listdir("/proc/self/fd")), resident_bytes()
    for _ in range(50):
        fail()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert resident_bytes() - memory < 40 << 20  # 50 leaked ones would be 800 MB


def test_a_refusal_that_somebody_keeps_does_not_keep_the_bytes(
    write_release: WriteRelease, keys: Keys
) -> None:
    folder = write_release(files=TINY_FILES | {"zz.data": bytes(64 << 20)})
    (folder / "zz.data").write_bytes(b"\1" + bytes((64 << 20) - 1))
    memory = resident_bytes()
    kept = [refusal(lambda: load_release_dir(folder, trust=keys.trust)) for _ in range(4)]
    assert resident_bytes() - memory < 60 << 20
    assert len(kept) == 4


def test_failures_at_every_link_leave_no_file_open(
    version: Path, served: Path, load: Callable[[], object], keys: Keys
) -> None:
    load()
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ReleaseError):
        load_release(version, model="other", trust=keys.trust)
    for name in ("model.onnx", "engine.json", "model.sig"):
        (served / name).write_bytes(b"")
        with pytest.raises(ReleaseError):
            load()
    (version / "current").write_bytes(b"")
    with pytest.raises(ReleaseError):
        load()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_settings_refuse_unknown_keys() -> None:
    with pytest.raises(msgspec.ValidationError, match="unsafe"):
        msgspec.convert({"unsafe": True}, TrustSettings)
