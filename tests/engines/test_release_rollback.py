"""Rolling back: to what was current before, past every check of the load chain, or not at all."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.history import HISTORY, Served, append_history, previous_release, read_history
from engines.loading import current_digest
from engines.publishing import Switch, publish_release, roll_back
from engines.release_list import earlier_releases, list_releases, prune_releases
from engines.trust import TrustSettings
from tests.engines.conftest import Keys, refusal
from tests.full_disk import REASON, room_for

WriteRelease = Callable[..., Path]
Publish = Callable[..., str]

A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return tmp_path / "repo" / "tiny" / "1"


@pytest.fixture
def publish(version: Path, write_release: WriteRelease, keys: Keys) -> Publish:
    """publish(number, **manifest fields) → digest of a new current release."""
    times = iter(range(1_000_000_000, 2_000_000_000, 60))

    def make(number: int, **fields: object) -> str:
        folder = write_release(f"r{number}", release=number, **fields)
        done = publish_release(folder, version, model="tiny", trust=keys.trust, clock=lambda: next(times))
        return done.digest

    return make


def back(version: Path, keys: Keys, to: str | None = None) -> Switch:
    return roll_back(version, model="tiny", trust=keys.trust, to=to)


def test_a_roll_back_goes_to_what_was_current_before_and_twice_comes_back(
    version: Path, publish: Publish, keys: Keys
) -> None:
    first, second, third = publish(1), publish(2), publish(3)
    assert back(version, keys) == Switch(second, 2, before=third)
    assert current_digest(version) == second
    assert back(version, keys) == Switch(third, 3, before=second)
    assert back(version, keys, to="1") == Switch(first, 1, before=third)
    assert back(version, keys).digest == third


def test_the_history_says_what_was_current_until_when(version: Path, publish: Publish, keys: Keys) -> None:
    first, second = publish(1), publish(2)
    publish(3)
    lines = (version / HISTORY).read_text().splitlines()
    assert lines == [f"2001-09-09T01:46:40Z {first}", f"2001-09-09T01:47:40Z {second}"]
    assert read_history(version) == (Served(first, 1e9), Served(second, 1e9 + 60))


def test_publishing_what_is_current_leaves_no_line(
    version: Path, write_release: WriteRelease, keys: Keys
) -> None:
    folder = write_release()
    for before in (None, "same"):
        done = publish_release(folder, version, model="tiny", trust=keys.trust)
        assert done.before == (before and done.digest)
        assert done.changed == (before is None)
    assert not (version / HISTORY).exists()


def test_a_release_is_chosen_by_number_or_by_the_beginning_of_its_digest(
    version: Path, publish: Publish, keys: Keys
) -> None:
    first, second = publish(1), publish(2)
    assert back(version, keys, to=first[:6]).digest == first
    assert back(version, keys, to=second).digest == second
    for wanted in ("3", first[:5], "", "x", "../..", "-1", "A" * 64, first + "0", "١"):
        error = refusal(lambda wanted=wanted: back(version, keys, to=wanted))
        assert (error.step, error.found[:4]) == ("rollback", "none")
    assert current_digest(version) == second


def test_a_number_that_two_releases_have_is_refused_with_both(
    version: Path, publish: Publish, write_release: WriteRelease, keys: Keys
) -> None:
    first = publish(1)
    other = write_release("other", release=1, lanes=3)
    second = publish_release(other, version, model="tiny", trust=keys.trust).digest
    error = refusal(lambda: back(version, keys, to="1"))
    assert error.found == ", ".join(sorted(digest[:16] for digest in (first, second)))


def test_without_a_release_before_there_is_no_way_back(version: Path, publish: Publish, keys: Keys) -> None:
    error = refusal(lambda: back(version, keys))
    assert (error.step, error.found) == ("rollback", "none")
    assert not version.exists()  # asking makes nothing
    digest = publish(1)
    error = refusal(lambda: back(version, keys))
    assert error.expected == f"a release that was current before {digest[:16]}"
    assert current_digest(version) == digest


def test_what_the_chain_refuses_is_not_gone_back_to(version: Path, publish: Publish, keys: Keys) -> None:
    first, second = publish(1), publish(2)
    history = (version / HISTORY).read_bytes()
    old = TrustSettings(keys=(keys.public,), min_release={"tiny": 2})
    assert refusal(lambda: roll_back(version, model="tiny", trust=old)).step == "min_release"
    assert refusal(lambda: roll_back(version, model="other", trust=keys.trust)).step == "model"
    weights = version / "releases" / first / "model.onnx.data"
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.write(b"\1")
    assert refusal(lambda: back(version, keys)).step == "digest"
    weights.unlink()
    assert refusal(lambda: back(version, keys)).step == "folder"
    assert current_digest(version) == second
    assert (version / HISTORY).read_bytes() == history


def test_a_release_that_was_removed_by_hand_says_so(version: Path, publish: Publish, keys: Keys) -> None:
    first, second = publish(1), publish(2)
    (version / "releases" / first).rename(version / "gone")
    error = refusal(lambda: back(version, keys))
    assert error.expected == f"the release that was current before ({first[:16]})"
    assert "removed" in error.found
    assert current_digest(version) == second


@pytest.mark.parametrize("damage", [b"", b"nonsense\n", None])
def test_a_roll_back_repairs_a_damaged_current(
    version: Path, publish: Publish, keys: Keys, damage: bytes | None
) -> None:
    first = publish(1)
    publish(2)
    (version / "current").unlink()
    if damage is not None:
        (version / "current").write_bytes(damage)
    assert back(version, keys) == Switch(first, 1, before=None)
    assert current_digest(version) == first


def test_the_history_is_on_disk_before_current_moves(
    version: Path, publish: Publish, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(1)
    publish(2)
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(fd: int) -> None:
        events.append("fsync " + re.sub(r"\.new-.*", "NEW", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def record_replace(source: Path, target: Path) -> None:
        events.append(f"rename {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    back(version, keys)
    assert events == ["fsync history", "fsync NEW", "rename current", "fsync 1"]


def test_a_torn_line_is_ended_by_the_next_and_skipped(tmp_path: Path) -> None:
    for at, digest in enumerate((A, B, C)):
        append_history(tmp_path, Served(digest, at))
    whole = (tmp_path / HISTORY).read_bytes()
    for cut in range(len(whole) + 1):
        (tmp_path / HISTORY).write_bytes(whole[:cut])
        append_history(tmp_path, Served(A, 60))
        only_its_end_is_missing = cut % 86 == 85
        kept = whole[:cut].count(b"\n") + only_its_end_is_missing
        assert [served.digest for served in read_history(tmp_path)] == [*[A, B, C][:kept], A]


def test_a_history_of_anything_is_read_without_complaint(tmp_path: Path) -> None:
    line = f"2026-11-29T17:20:03Z {A}"
    junk = [b"\0" * 9, b"\xff\xfe", b"", f"2026-02-31T17:20:03Z {B}".encode(), b"x" * 300, line[:-1].encode()]
    (tmp_path / HISTORY).write_bytes(b"\n".join([*junk, line.encode(), *junk]))
    assert [served.digest for served in read_history(tmp_path)] == [A]


def test_of_a_long_history_the_end_is_read(tmp_path: Path) -> None:
    line = f"2026-11-29T17:20:03Z {A}\n"
    (tmp_path / HISTORY).write_text(line * 10_000 + line.replace("a", "b"))
    history = read_history(tmp_path)
    assert 1_000 < len(history) < 4_000
    assert history[-1].digest == B


def test_a_full_disk_leaves_the_history_as_it_was(tmp_path: Path) -> None:
    append_history(tmp_path, Served(A, 0))
    before = (tmp_path / HISTORY).read_bytes()
    with room_for(len(before) + 10), pytest.raises(OSError, match=REASON):
        append_history(tmp_path, Served(B, 1))
    assert (tmp_path / HISTORY).read_bytes() == before


@pytest.mark.parametrize("kind", ["symlink", "folder", "fifo"])
def test_a_history_that_is_no_file_is_refused_and_nothing_moves(
    version: Path, publish: Publish, write_release: WriteRelease, keys: Keys, kind: str, tmp_path: Path
) -> None:
    digest = publish(1)
    history = version / HISTORY
    if kind == "symlink":
        (tmp_path / "precious").write_text("")
        history.symlink_to(tmp_path / "precious")
    elif kind == "folder":
        history.mkdir()
    else:
        os.mkfifo(history)
    assert refusal(lambda: back(version, keys)).step == "history"
    assert refusal(lambda: list_releases(version, model="tiny", trust=keys.trust)).step == "history"
    folder = write_release("new", release=2)
    error = refusal(lambda: publish_release(folder, version, model="tiny", trust=keys.trust))
    assert (error.step, current_digest(version)) == ("publish", digest)
    assert (tmp_path / "precious").read_text() == "" if kind == "symlink" else True


@pytest.mark.parametrize(
    ("history", "current", "previous"),
    [
        ([], None, None), ([], A, None), ([A], B, A), ([A], A, None), ([A, B], B, A), ([A, B], C, B),
        ([A, B, C], B, C), ([A, B, B], B, A), ([A, B], None, B),
    ],
)  # fmt: skip
def test_previous_is_the_last_other_that_was_current(
    history: list[str], current: str | None, previous: str | None
) -> None:
    assert previous_release([Served(digest, 0) for digest in history], current) == previous


def test_earlier_releases_are_those_that_are_there_the_latest_first(
    version: Path, publish: Publish, keys: Keys
) -> None:
    first, second, third, fourth = (publish(number) for number in range(1, 5))
    assert earlier_releases(version) == (third, second, first)
    back(version, keys, to=second)
    assert earlier_releases(version) == (fourth, third, first)
    shutil.rmtree(version / "releases" / fourth)
    (version / "current").unlink()
    assert earlier_releases(version) == (third, second, first)
    (version / HISTORY).unlink()
    assert earlier_releases(version) == ()
    (version / HISTORY).mkdir()
    assert earlier_releases(version) == ()


def test_releases_are_listed_newest_first_with_what_they_are(
    version: Path, publish: Publish, keys: Keys, other_keys: Keys
) -> None:
    first, second, third = publish(1), publish(2), publish(10)
    back(version, keys)
    os.truncate(version / "releases" / first / "tokenizer.json", 3)
    (version / "releases" / third / "engine.json").chmod(0o644)
    (version / "releases" / third / "engine.json").write_text("{}")
    listed = list_releases(version, model="tiny", trust=keys.trust)
    assert [(one.digest, one.release) for one in listed] == [(second, 2), (first, 1), (third, -1)]
    assert [one.current for one in listed] == [True, False, False]
    assert [one.previous for one in listed] == [False, False, True]
    assert [one.refusal and one.refusal.step for one in listed] == [None, "files", "digest"]
    assert listed[0].nbytes == sum(path.stat().st_size for path in (version / "releases" / second).iterdir())
    listed = list_releases(version, model="tiny", trust=other_keys.trust)
    assert {one.refusal.step for one in listed if one.refusal} == {"signature"}
    least = TrustSettings(keys=(keys.public,), min_release={"tiny": 3})
    assert list_releases(version, model="tiny", trust=least)[0].refusal.step == "min_release"  # type: ignore[union-attr]


def test_what_is_no_release_folder_is_not_listed(version: Path, publish: Publish, keys: Keys) -> None:
    digest = publish(1)
    for name in (".new-x", "notes", "A" * 64, "b" * 63):
        (version / "releases" / name).mkdir()
    (version / "releases" / B).write_text("a file")
    (version / "releases" / C).symlink_to(version / "releases" / digest)
    assert [one.digest for one in list_releases(version, model="tiny", trust=keys.trust)] == [digest]


def test_pruning_keeps_the_newest_the_current_the_previous_and_what_serves(
    version: Path, publish: Publish, keys: Keys
) -> None:
    digests = [publish(number) for number in range(1, 8)]
    back(version, keys, to="2")
    back(version, keys, to="1")
    removed = prune_releases(version, keep=2, spare=(digests[3][:16],), model="tiny", trust=keys.trust)
    assert [one.release for one in removed] == [5, 3]
    assert sorted(one.release for one in list_releases(version, model="tiny", trust=keys.trust)) == [
        1, 2, 4, 6, 7,
    ]  # fmt: skip
    assert [path.name for path in version.rglob(".new-*")] == []
    assert prune_releases(version, keep=9, model="tiny", trust=keys.trust) == ()
    assert back(version, keys).release == 2


def test_a_damaged_release_is_pruned_before_any_other(version: Path, publish: Publish, keys: Keys) -> None:
    digests = [publish(number) for number in range(1, 5)]
    (version / "releases" / digests[1] / "engine.json").unlink()
    removed = prune_releases(version, keep=3, model="tiny", trust=keys.trust)
    assert [(one.digest, one.release) for one in removed] == [(digests[1], -1)]


def test_a_home_with_any_name_can_be_rolled_back(
    tmp_path: Path, write_release: WriteRelease, keys: Keys
) -> None:
    version = tmp_path / "Modelle für 東京 [1] *?\n%s \udcff" / "tiny" / "1"
    folders = [write_release(f"r{number}", release=number) for number in (1, 2)]
    first, _ = [publish_release(folder, version, model="tiny", trust=keys.trust).digest for folder in folders]
    assert back(version, keys).digest == first
    assert len(list_releases(version, model="tiny", trust=keys.trust)) == 2
    assert back(version, keys, to="2").release == 2
