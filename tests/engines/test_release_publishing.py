"""Publishing: what lands in the version folder, in which order, and what a refusal leaves of it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import ReleaseError
from engines.history import previous_release, read_history
from engines.loading import current_digest, load_release
from engines.publishing import publish_release
from engines.signing import sign_release
from engines.trust import TrustSettings
from tests.engines.conftest import TINY_FILES, Keys
from tests.full_disk import REASON, room_for

WriteRelease = Callable[..., Path]


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return tmp_path / "repo" / "tiny" / "1"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(version: Path) -> list[str]:
    return [path.name for path in version.rglob(".new-*")]


def test_a_published_release_serves(version: Path, write_release: WriteRelease, keys: Keys) -> None:
    folder = write_release()
    digest = publish_release(folder, version, model="tiny", trust=keys.trust).digest
    assert current_digest(version) == digest
    assert (version / "current").read_text() == digest + "\n"
    assert load_release(version, model="tiny", trust=keys.trust).digest == digest
    assert contents(version / "releases" / digest) == contents(folder)
    assert leftovers(version) == []


def test_publishing_again_changes_nothing(version: Path, write_release: WriteRelease, keys: Keys) -> None:
    folder = write_release()
    digest = publish_release(folder, version, model="tiny", trust=keys.trust).digest
    target = version / "releases" / digest
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in target.iterdir()}
    assert publish_release(folder, version, model="tiny", trust=keys.trust).digest == digest
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in target.iterdir()} == before


def test_publishing_again_makes_whoever_watches_current_look_again(
    version: Path, write_release: WriteRelease, keys: Keys
) -> None:
    """A server that refused the release, for want of memory say, tries it once more."""
    folder = write_release()
    publish_release(folder, version, model="tiny", trust=keys.trust)
    line, before = (version / "current").read_bytes(), (version / "current").stat()
    done = publish_release(folder, version, model="tiny", trust=keys.trust)
    after = (version / "current").stat()
    assert (version / "current").read_bytes() == line
    assert not done.changed
    assert (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns)
    assert previous_release(read_history(version), done.digest) is None


def test_a_second_release_takes_over_and_the_first_stays_for_a_roll_back(
    version: Path, write_release: WriteRelease, keys: Keys
) -> None:
    old, new = write_release("old", release=1), write_release("new", release=2)
    first = publish_release(old, version, model="tiny", trust=keys.trust).digest
    second = publish_release(new, version, model="tiny", trust=keys.trust).digest
    assert current_digest(version) == second != first
    assert publish_release(old, version, model="tiny", trust=keys.trust).digest == first
    assert load_release(version, model="tiny", trust=keys.trust).manifest.release == 1


def test_what_the_chain_refuses_is_not_published(
    version: Path, write_release: WriteRelease, keys: Keys
) -> None:
    good, bad = write_release("good"), write_release("bad", release=9)
    digest = publish_release(good, version, model="tiny", trust=keys.trust).digest
    (bad / "model.onnx").write_bytes(TINY_FILES["model.onnx"][::-1])
    with pytest.raises(ReleaseError, match="digest"):
        publish_release(bad, version, model="tiny", trust=keys.trust)
    with pytest.raises(ReleaseError, match="model"):
        publish_release(good, version, model="other", trust=keys.trust)
    with pytest.raises(ReleaseError, match="min_release"):
        publish_release(
            good, version, model="tiny", trust=TrustSettings(keys=(keys.public,), min_release={"tiny": 4})
        )
    assert current_digest(version) == digest
    assert sorted(path.name for path in (version / "releases").iterdir()) == [".lock", digest]


@pytest.mark.parametrize("damage", ["altered", "missing", "extra", "empty", "symlink"])
def test_publishing_again_repairs_a_damaged_copy(
    version: Path, write_release: WriteRelease, keys: Keys, damage: str, tmp_path: Path
) -> None:
    folder = write_release()
    digest = publish_release(folder, version, model="tiny", trust=keys.trust).digest
    target = version / "releases" / digest
    weights = target / "model.onnx.data"
    weights.chmod(0o644)
    if damage == "altered":
        weights.write_bytes(b"x" * weights.stat().st_size)
    elif damage == "missing":
        weights.unlink()
    elif damage == "extra":
        (target / "extra").write_text("x")
    elif damage == "empty":
        shutil.rmtree(target)
        target.mkdir()
    else:
        target.symlink_to(target.rename(tmp_path / "moved"))
    with pytest.raises(ReleaseError):
        load_release(version, model="tiny", trust=keys.trust)
    assert publish_release(folder, version, model="tiny", trust=keys.trust).digest == digest
    assert load_release(version, model="tiny", trust=keys.trust).digest == digest
    assert leftovers(version) == []


def test_a_new_signature_over_the_same_bytes_replaces_only_the_signature(
    version: Path, write_release: WriteRelease, keys: Keys, other_keys: Keys
) -> None:
    folder = write_release()
    digest = publish_release(folder, version, model="tiny", trust=keys.trust).digest
    target = version / "releases" / digest
    inodes = {path.name: path.stat().st_ino for path in target.iterdir()}
    sign_release(folder, other_keys.private)
    assert publish_release(folder, version, model="tiny", trust=other_keys.trust).digest == digest
    assert load_release(version, model="tiny", trust=other_keys.trust).digest == digest
    changed = {path.name for path in target.iterdir() if inodes[path.name] != path.stat().st_ino}
    assert changed == {"model.sig"}


def test_everything_is_on_disk_before_current_moves(
    version: Path, write_release: WriteRelease, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut loses nothing: a rename comes after the fsync of what it names, and is fsynced itself."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def name(path: str) -> str:  # scratch names are random
        parts = Path(path).relative_to(version.parent).parts
        return "/".join("NEW" if part.startswith(".new-") else part for part in parts)

    def record_fsync(fd: int) -> None:
        events.append(("fsync", name(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def record_rename(source: Path, target: Path) -> None:
        events.append(("rename", name(str(target))))
        rename(source, target)

    def record_replace(source: Path, target: Path) -> None:
        events.append(("rename", name(str(target))))
        replace(source, target)

    folder = write_release()
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_replace)
    digest = publish_release(folder, version, model="tiny", trust=keys.trust).digest
    files = {("fsync", f"1/releases/NEW/{file}") for file in (*TINY_FILES, "engine.json", "model.sig")}
    assert set(events[: len(files)]) == files
    assert events[len(files) :] == [
        ("fsync", "1/releases/NEW"),
        ("rename", f"1/releases/{digest}"),
        ("fsync", "1/releases"),
        ("fsync", "1"),
        ("fsync", ""),
        ("fsync", "1/releases/NEW"),
        ("rename", "1/current"),
        ("fsync", "1"),
    ]


def test_a_place_that_cannot_be_written_says_so(
    tmp_path: Path, write_release: WriteRelease, keys: Keys
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReleaseError) as caught:
        publish_release(write_release(), tmp_path / "file" / "1", model="tiny", trust=keys.trust)
    assert caught.value.step == "publish"
    assert "Not a directory" in caught.value.found


def test_a_full_disk_leaves_the_old_release_and_nothing_in_the_making(
    version: Path, write_release: WriteRelease, keys: Keys
) -> None:
    old, new = write_release("old", release=1), write_release("new", release=2)
    digest = publish_release(old, version, model="tiny", trust=keys.trust).digest
    with room_for(1000), pytest.raises(ReleaseError, match=f"publish: expected to write to .*{REASON}"):
        publish_release(new, version, model="tiny", trust=keys.trust)
    assert current_digest(version) == digest
    assert sorted(path.name for path in (version / "releases").iterdir()) == [".lock", digest]


def test_a_busy_publisher_is_waited_for_only_so_long(
    version: Path, write_release: WriteRelease, keys: Keys
) -> None:
    import fcntl

    folder = write_release()
    publish_release(folder, version, model="tiny", trust=keys.trust)
    with (version / "releases" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ReleaseError, match="no other publisher"):
            publish_release(folder, version, model="tiny", trust=keys.trust, lock_seconds=0.05)
    publish_release(folder, version, model="tiny", trust=keys.trust)


def test_leftovers_of_a_killed_publisher_do_not_reach_outside(
    version: Path, tmp_path: Path, write_release: WriteRelease, keys: Keys
) -> None:
    folder = write_release()
    publish_release(folder, version, model="tiny", trust=keys.trust)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (version / "releases" / ".new-link").symlink_to(precious)
    publish_release(folder, version, model="tiny", trust=keys.trust)
    assert (precious / "file").read_text() == "x"
    assert leftovers(version) == []


def test_a_reader_in_the_same_folder_keeps_its_bytes_while_another_release_takes_over(
    version: Path, write_release: WriteRelease, keys: Keys
) -> None:
    old, new = write_release("old", release=1), write_release("new", release=2)
    publish_release(old, version, model="tiny", trust=keys.trust)
    release = load_release(version, model="tiny", trust=keys.trust)
    publish_release(new, version, model="tiny", trust=keys.trust)
    shutil.rmtree(version / "releases" / release.digest)
    assert bytes(release.files["model.onnx.data"]) == TINY_FILES["model.onnx.data"]
    assert os.path.basename(release.path) == release.digest
