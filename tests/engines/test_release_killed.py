"""Whoever changes the current release may be killed at any call, meet a full disk at any, or have company."""

import errno
import itertools
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.errors import ReleaseError
from engines.history import previous_release, read_history
from engines.loading import current_digest, load_release
from engines.publishing import publish_release, roll_back
from engines.release_list import prune_releases
from tests.engines.conftest import Keys
from tests.engines.disk_calls import killed_everywhere, refusing_disk

WriteRelease = Callable[..., Path]


@dataclass(frozen=True)
class Place:
    """A version folder that served `oldest`, then `old`, and a release `new` that it has never seen."""

    version: Path
    new: Path
    digests: dict[str, str]


@pytest.fixture
def place(tmp_path: Path, write_release: WriteRelease, keys: Keys) -> Place:
    version, digests = tmp_path / "repo" / "tiny" / "1", {}
    for number, name in enumerate(("oldest", "old"), start=1):
        folder = write_release(name, release=number)
        digests[name] = publish_release(folder, version, model="tiny", trust=keys.trust).digest
    new = write_release("new", release=3)
    elsewhere = tmp_path / "elsewhere" / "1"
    digests["new"] = publish_release(new, elsewhere, model="tiny", trust=keys.trust).digest
    return Place(version, new, digests)


def state(version: Path, keys: Keys, names: dict[str, str]) -> tuple[str, str | None]:
    """The release that serves, which must load, and the one that a roll-back would go to, by name."""
    by_digest = {digest: name for name, digest in names.items()}
    serves = load_release(version, model="tiny", trust=keys.trust).digest
    previous = previous_release(read_history(version), serves)
    return by_digest[serves], None if previous is None else by_digest[previous]


def leftovers(version: Path) -> list[str]:
    return [path.name for path in version.rglob(".new-*")]


def test_a_publisher_killed_at_any_call_leaves_the_old_or_the_new(
    place: Place, tmp_path: Path, keys: Keys
) -> None:
    seen = set()
    left = killed_everywhere(
        "publish", start=place.version, new=place.new, work=tmp_path / "killed", key=keys.public
    )
    for version in left:
        seen.add(state(version, keys, place.digests))
        # and the next publisher finds nothing in its way, and clears what the killed one left
        publish_release(place.new, version, model="tiny", trust=keys.trust)
        assert state(version, keys, place.digests) == ("new", "old")
        assert leftovers(version) == []
    assert seen == {("old", "oldest"), ("new", "old")}
    assert len(left) > 2 * 15


def test_a_publisher_that_repairs_killed_at_any_call_leaves_the_old_or_the_new(
    place: Place, tmp_path: Path, keys: Keys
) -> None:
    broken = place.version / "releases" / place.digests["new"]  # lies there already, and does not serve
    broken.mkdir()
    (broken / "engine.json").write_text("{}")
    seen = set()
    for version in killed_everywhere(
        "publish", start=place.version, new=place.new, work=tmp_path / "killed", key=keys.public
    ):
        seen.add(state(version, keys, place.digests))
        publish_release(place.new, version, model="tiny", trust=keys.trust)
        assert state(version, keys, place.digests) == ("new", "old")
        assert leftovers(version) == []
    assert seen == {("old", "oldest"), ("new", "old")}


def test_a_roll_back_killed_at_any_call_has_happened_or_not(place: Place, tmp_path: Path, keys: Keys) -> None:
    seen = set()
    for version in killed_everywhere(
        "roll back", start=place.version, new=place.new, work=tmp_path / "killed", key=keys.public
    ):
        before = state(version, keys, place.digests)
        seen.add(before)
        roll_back(version, model="tiny", trust=keys.trust)  # toggles, whichever it was
        assert state(version, keys, place.digests) == before[::-1]
        assert leftovers(version) == []
    assert seen == {("old", "oldest"), ("oldest", "old")}


def test_pruning_killed_at_any_call_leaves_whole_releases(place: Place, tmp_path: Path, keys: Keys) -> None:
    publish_release(place.new, place.version, model="tiny", trust=keys.trust)
    oldest = place.digests["oldest"]
    seen = set()
    for version in killed_everywhere(
        "prune", start=place.version, new=place.new, work=tmp_path / "killed", key=keys.public
    ):
        assert state(version, keys, place.digests) == ("new", "old")
        load_release(version, place.digests["old"], model="tiny", trust=keys.trust)
        seen.add((version / "releases" / oldest).exists())
        if (version / "releases" / oldest).exists():
            load_release(version, oldest, model="tiny", trust=keys.trust)
        prune_releases(version, keep=1, model="tiny", trust=keys.trust)
        assert not (version / "releases" / oldest).exists()
        assert leftovers(version) == []
    assert seen == {True, False}


@pytest.mark.parametrize("action", ["publish", "roll back"])
@pytest.mark.parametrize(
    ("lasting", "reason"),
    [(False, errno.ENOSPC), (True, errno.EROFS)],
    ids=["one call", "read-only from then"],
)
def test_a_disk_that_refuses_any_call_is_one_line_and_loses_nothing(
    place: Place, tmp_path: Path, keys: Keys, action: str, lasting: bool, reason: int
) -> None:
    before, after = {
        "publish": (("old", "oldest"), ("new", "old")),
        "roll back": (("old", "oldest"), ("oldest", "old")),
    }[action]

    def act(version: Path) -> None:
        if action == "publish":
            publish_release(place.new, version, model="tiny", trust=keys.trust)
        else:
            roll_back(version, model="tiny", trust=keys.trust)

    refusals, at, met = [], 0, True
    while met:
        at += 1
        version = tmp_path / str(at)
        shutil.copytree(place.version, version)
        with refusing_disk(at, lasting=lasting, reason=reason) as disk:
            try:
                act(version)
                possible = {after}  # as when a folder that was there need not be made
            except ReleaseError as error:
                refusals.append(str(error))
                possible = {before, after}
        met = disk.refused
        assert state(version, keys, place.digests) in possible
        publish_release(place.new, version, model="tiny", trust=keys.trust)  # the next one is not in its way
        assert leftovers(version) == []
        shutil.rmtree(version)
    assert len(refusals) > 3
    told = rf"publish: expected to write to {tmp_path}/\d+, found {os.strerror(reason)} \(.+\)"
    assert [text for text in refusals if not re.fullmatch(told, text)] == []


def test_many_at_once_leave_one_whole_release_and_a_history_of_what_was_current(
    tmp_path: Path, write_release: WriteRelease, keys: Keys
) -> None:
    version = tmp_path / "repo" / "tiny" / "1"
    folders = [write_release(f"r{number}", release=number) for number in range(3)]
    published = {
        publish_release(folder, version, model="tiny", trust=keys.trust).digest for folder in folders
    }
    failures: list[BaseException] = []
    stop = threading.Event()
    seen = set()

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def publish(folder: Path) -> None:
        for _ in range(4):
            publish_release(folder, version, model="tiny", trust=keys.trust)

    def roll_back_often() -> None:
        for _ in range(4):
            done = roll_back(version, model="tiny", trust=keys.trust)
            assert done.before != done.digest

    def read() -> None:
        while not stop.is_set():
            seen.add(load_release(version, model="tiny", trust=keys.trust).digest)

    reader = guarded(read)
    writers = [guarded(lambda folder=folder: publish(folder)) for folder in folders]
    writers += [guarded(roll_back_often) for _ in range(2)]
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert failures == []
    assert seen <= published
    assert load_release(version, model="tiny", trust=keys.trust).digest == current_digest(version)
    history = [served.digest for served in read_history(version)]
    assert set(history) <= published
    assert all(one != other for one, other in itertools.pairwise(history))
    assert history[-1] != current_digest(version)
    assert leftovers(version) == []
