"""The load chain: what it hands out, and that each link refuses with one line: expected and found."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.loading import current_digest, inspect_release, load_release, load_release_dir
from engines.trust import TrustSettings
from tests.engines.conftest import TINY_FILES, Keys, refusal, tiny_manifest

WriteRelease = Callable[..., Path]


def test_a_sound_release_loads_as_bytes_in_memory(version: Path, served: Path, keys: Keys) -> None:
    release = load_release(version, model="tiny", trust=keys.trust)
    assert release.manifest == tiny_manifest(TINY_FILES)
    assert release.digest == served.name == current_digest(version)
    assert release.path == served
    assert {name: bytes(data) for name, data in release.files.items()} == {
        path.name: path.read_bytes() for path in served.iterdir()
    }
    for data in release.files.values():
        assert data.readonly


def test_a_release_that_is_not_published_loads_too(write_release: WriteRelease, keys: Keys) -> None:
    folder = write_release()
    assert load_release_dir(folder, trust=keys.trust).manifest.model == "tiny"
    assert load_release_dir(folder, model="tiny", trust=keys.trust).path == folder


def test_any_of_several_trusted_keys_will_do(version: Path, keys: Keys, other_keys: Keys) -> None:
    trust = TrustSettings(keys=(other_keys.public, keys.public))
    assert load_release(version, model="tiny", trust=trust).manifest.release == 3


def test_a_hard_link_is_a_regular_file(served: Path, load: Callable[[], object]) -> None:
    os.link(served / "model.onnx", served.parent.parent / "also")
    assert load() is not None


def test_without_keys_everything_is_refused(version: Path) -> None:
    error = refusal(lambda: load_release(version, model="tiny", trust=TrustSettings()))
    assert error.step == "trust"
    assert "none: no release can load" in error.found


def test_an_unknown_key_is_refused(version: Path, other_keys: Keys) -> None:
    error = refusal(lambda: load_release(version, model="tiny", trust=other_keys.trust))
    assert error.step == "signature"
    assert "trusted key" in error.expected


def test_a_key_file_that_is_none_is_refused(version: Path, tmp_path: Path, keys: Keys) -> None:
    junk = tmp_path / "junk.pub"
    junk.write_bytes(b"\x89PNG\r\n")
    for path in (junk, tmp_path / "missing.pub", keys.private):
        error = refusal(
            lambda path=path: load_release(version, model="tiny", trust=TrustSettings(keys=(path,)))
        )
        assert error.step == "trust"
        assert str(path) in error.found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"../../../../etc",
        b"../" * 21 + b"\n",
        b"a" * 63 + b"\n",
        b"a" * 65 + b"\n",
        b"A" * 64 + b"\n",
        b"a" * 64 + b"\n\n",
        b"a" * 64 + b"\r\n",
        b" " + b"a" * 63,
        b"a" * 64 + b"\nb",
        b"\0" * 64,
        b"a" * 63 + b"\0",
        b"\xff\xfe" * 32,
        "ａ".encode() * 21,
    ],
)
def test_current_must_be_a_digest(version: Path, load: Callable[[], object], content: bytes) -> None:
    (version / "current").write_bytes(content)
    assert refusal(load).step == "current"


def test_a_huge_current_is_not_read(version: Path, load: Callable[[], object]) -> None:
    with (version / "current").open("r+b") as file:
        file.truncate(1 << 40)
    error = refusal(load)
    assert error.step == "current"
    assert "at most 128 bytes" in error.expected


def test_current_without_its_newline_is_fine(version: Path, load: Callable[[], object], served: Path) -> None:
    (version / "current").write_text(served.name)
    assert load() is not None


@pytest.mark.parametrize("digest", ["..", "../../tiny/1/releases/x", "", "a" * 63, "A" * 64, "a" * 64 + "/"])
def test_a_release_is_named_by_a_digest_and_nothing_else(version: Path, keys: Keys, digest: str) -> None:
    for call in (load_release, inspect_release):
        error = refusal(lambda call=call: call(version, digest, model="tiny", trust=keys.trust))
        assert (error.step, error.found) == ("digest", ascii(digest))


def test_a_release_that_is_not_current_loads_by_its_digest(version: Path, served: Path, keys: Keys) -> None:
    (version / "current").unlink()
    assert load_release(version, served.name, model="tiny", trust=keys.trust).digest == served.name


def test_a_missing_current_says_how_to_publish(version: Path, load: Callable[[], object]) -> None:
    (version / "current").unlink()
    error = refusal(load)
    assert error.step == "current"
    assert "tensorcache deploy" in error.found


def test_current_as_symlink_folder_or_fifo_is_refused(version: Path, load: Callable[[], object]) -> None:
    current = version / "current"
    for make in (lambda: current.symlink_to(version / "real"), current.mkdir, lambda: os.mkfifo(current)):
        shutil.rmtree(current) if current.is_dir() else current.rename(version / "real")
        make()
        assert refusal(load).step == "current"


def test_current_that_names_no_release_is_refused(version: Path, load: Callable[[], object]) -> None:
    (version / "current").write_text("a" * 64 + "\n")
    assert refusal(load).step == "folder"


def test_the_release_folder_or_releases_as_symlink_is_refused(
    version: Path, served: Path, load: Callable[[], object]
) -> None:
    real = served.rename(version / "elsewhere")
    served.symlink_to(real)
    assert refusal(load).step == "folder"
    served.unlink()
    real.rename(served)
    releases = (version / "releases").rename(version / "moved")
    (version / "releases").symlink_to(releases)
    assert refusal(load).step == "folder"


def test_a_link_to_an_unpublished_release_is_refused(
    write_release: WriteRelease, tmp_path: Path, keys: Keys
) -> None:
    link = tmp_path / "link"
    link.symlink_to(write_release())
    assert refusal(lambda: load_release_dir(link, trust=keys.trust)).step == "folder"


def test_the_version_folder_itself_may_be_a_link(version: Path, tmp_path: Path, keys: Keys) -> None:
    link = tmp_path / "link"
    link.symlink_to(version)
    assert load_release(link, model="tiny", trust=keys.trust).manifest.model == "tiny"


def test_a_missing_version_folder_is_refused(tmp_path: Path, keys: Keys) -> None:
    for path in (tmp_path / "nothing", tmp_path / "a\0b"):
        error = refusal(lambda path=path: load_release(path, model="tiny", trust=keys.trust))
        assert error.step == "folder"


@pytest.mark.parametrize(
    "name", ["extra.bin", ".gitignore", ".gitattributes", "new\nline", "ü", "model.sig.bak"]
)
def test_an_extra_file_is_refused(served: Path, load: Callable[[], object], name: str) -> None:
    (served / name).write_text("*")
    error = refusal(load)
    assert error.step == "folder"
    assert ascii(name) in error.found


@pytest.mark.parametrize("name", ["sub", ".git", ".github"])
def test_a_subfolder_is_refused_even_an_empty_one(
    served: Path, load: Callable[[], object], name: str
) -> None:
    (served / name).mkdir()
    error = refusal(load)
    assert error.step == "folder"
    assert f"the folder {name!r}" in error.found


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
def test_a_missing_file_is_refused(served: Path, load: Callable[[], object], name: str) -> None:
    (served / name).unlink()
    error = refusal(load)
    assert error.step == "folder"
    assert name in error.found


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json", "model.sig"])
@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_only_regular_files_are_read(
    served: Path, tmp_path: Path, load: Callable[[], object], name: str, kind: str
) -> None:
    real = (served / name).rename(tmp_path / "real")
    if kind == "symlink":
        (served / name).symlink_to(real)
    elif kind == "fifo":
        os.mkfifo(served / name)
    else:
        (served / name).mkdir()
    error = refusal(load)
    assert error.step == "folder"
    assert kind in error.found.lower()
