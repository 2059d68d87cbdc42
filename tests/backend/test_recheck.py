"""Looking again at the release in service: what is reported, when it is over, and whom it follows."""

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.recheck import Recheck
from engines import (
    Difference,
    Pace,
    Rehash,
    ReleaseFacts,
    TrustSettings,
    generate_signing_key,
    load_release_dir,
    sign_release,
)

HOUR = 3600.0


class Clock:
    """A clock that moves when it is told to, and when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waited: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float | None) -> bool:
        assert seconds is not None
        self.waited.append(seconds)
        self.now += seconds
        return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def signed(small_release: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrustSettings]:
    folder = tmp_path_factory.mktemp("recheck")
    private, public = generate_signing_key(folder / "keys")
    shutil.copytree(small_release, folder / "release")
    sign_release(folder / "release", private)
    return folder / "release", TrustSettings(keys=(public,))


@pytest.fixture
def loaded(signed: tuple[Path, TrustSettings], tmp_path: Path) -> ReleaseFacts:
    """A release of its own for each test, as it was loaded."""
    shutil.copytree(signed[0], tmp_path / "release")
    return load_release_dir(tmp_path / "release", trust=signed[1]).facts


@pytest.fixture
def recheck(signed: tuple[Path, TrustSettings], loaded: ReleaseFacts, clock: Clock) -> Recheck:
    made = Recheck(
        trust=signed[1], recheck_s=300, rehash_s=24 * HOUR, unready=True, clock=clock, wait=clock.wait
    )
    made.watch(loaded)
    return made


def metrics(recheck: Recheck) -> dict[str, float]:
    return {reading.name: reading.value for reading in recheck.readings()}


def alter(facts: ReleaseFacts, name: str = "tokenizer.json") -> None:
    """Another byte, the same size, time and inode: only a full look can see it."""
    path = facts.path / name
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_an_intact_release_is_looked_at_on_time_and_nothing_is_said(
    recheck: Recheck, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert recheck.turn() == 300
    for _ in range(3):
        clock.now += 300
        assert recheck.turn() == 300
    assert metrics(recheck) == {"release_differences_total": 0, "release_intact": 1}
    assert recheck.ready
    assert caplog.text == ""


def test_a_changed_file_is_reported_once_by_name(
    recheck: Recheck, loaded: ReleaseFacts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (loaded.path / "engine.json").chmod(0o644)
    with (loaded.path / "engine.json").open("ab") as file:
        file.write(b"x")
    for _ in range(3):
        clock.now += 300
        recheck.turn()
    assert metrics(recheck) == {"release_differences_total": 1, "release_intact": 0}
    assert not recheck.ready
    size = loaded.files["engine.json"].status.size
    quick, full = [record.getMessage() for record in caplog.records]
    assert quick.startswith(f"release {loaded.digest[:16]} is not as it was loaded: engine.json: expected ")
    assert f"expected {size} bytes, written" in quick
    assert f"found {size + 1} bytes, written" in quick
    assert full.endswith(f"expected {size} bytes in engine.json, found {size + 1} bytes")
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_a_byte_that_only_a_full_look_sees_is_found_within_a_day(
    recheck: Recheck, loaded: ReleaseFacts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    alter(loaded)
    clock.now += 300
    recheck.turn()
    assert recheck.intact
    clock.now += 24 * HOUR
    recheck.turn()
    assert not recheck.intact
    assert f"tokenizer.json: expected SHA-256 {loaded.files['tokenizer.json'].sha256}, found" in caplog.text


def test_a_full_look_reads_at_100_megabytes_a_second_at_most(
    recheck: Recheck, loaded: ReleaseFacts, clock: Clock
) -> None:
    clock.now += 24 * HOUR
    started = clock.now
    recheck.turn()
    read = loaded.nbytes - loaded.files["model.sig"].status.size
    assert read / (clock.now - started) == pytest.approx(100e6)


def test_a_touched_file_is_an_alarm_until_its_bytes_were_read(
    recheck: Recheck, loaded: ReleaseFacts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    os.utime(loaded.path / "tokenizer.json", ns=(0, 0))
    clock.now += 300
    recheck.turn()
    assert metrics(recheck) == {"release_differences_total": 1, "release_intact": 1}
    assert "written 1970-01-01T00:00:00.000000000Z" in caplog.text
    assert "every byte is as it was loaded" in caplog.text
    caplog.clear()
    clock.now += 300
    recheck.turn()
    assert caplog.text == ""


@pytest.mark.parametrize("what", ["folder", "file", "extra", "link"])
def test_what_is_gone_or_new_is_a_difference(
    recheck: Recheck, loaded: ReleaseFacts, clock: Clock, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "folder":
        shutil.rmtree(loaded.path)
    elif what == "file":
        (loaded.path / "tokenizer.json").unlink()
    elif what == "extra":
        (loaded.path / "extra.bin").touch()
    else:
        (loaded.path / "tokenizer.json").rename(loaded.path.parent / "moved")
        (loaded.path / "tokenizer.json").symlink_to(loaded.path.parent / "moved")
    clock.now += 300
    recheck.turn()
    assert metrics(recheck) == {"release_differences_total": 1, "release_intact": 0}
    named = {"folder": str(loaded.path), "extra": "extra.bin"}.get(what, "tokenizer.json")
    assert named in caplog.text
    assert {"folder": "No such file", "file": "No such file", "extra": "nothing of", "link": "symlink"}[
        what
    ] in caplog.text


def test_a_file_that_is_put_back_ends_the_alarm(recheck: Recheck, loaded: ReleaseFacts, clock: Clock) -> None:
    away = loaded.path.parent / "away"
    (loaded.path / "tokenizer.json").rename(away)
    clock.now += 300
    recheck.turn()
    assert not recheck.intact
    away.rename(loaded.path / "tokenizer.json")
    clock.now += 300
    recheck.turn()
    assert recheck.intact


def test_a_lasting_difference_is_not_read_in_full_every_five_minutes(
    recheck: Recheck, loaded: ReleaseFacts, clock: Clock
) -> None:
    alter(loaded)
    os.utime(loaded.path / "tokenizer.json", ns=(0, 0))
    clock.now += 300
    recheck.turn()
    clock.waited.clear()
    for _ in range(5):
        clock.now += 300
        recheck.turn()
    assert clock.waited == []
    assert not recheck.intact


def test_a_release_signed_again_is_intact_and_one_signed_for_others_is_not(
    signed: tuple[Path, TrustSettings], loaded: ReleaseFacts, clock: Clock, tmp_path: Path
) -> None:
    private, public = generate_signing_key(tmp_path / "second")
    trust = TrustSettings(keys=(*signed[1].keys, public))
    recheck = Recheck(trust=trust, recheck_s=300, rehash_s=0, unready=False, clock=clock, wait=clock.wait)
    recheck.watch(loaded)
    sign_release(loaded.path, private)
    clock.now += 300
    recheck.turn()
    assert recheck.intact
    (loaded.path / "model.sig").write_text("{}")
    clock.now += 300
    recheck.turn()
    assert not recheck.intact
    assert recheck.ready  # by setting


def test_it_follows_a_swap_and_forgets_the_old_release(
    recheck: Recheck, loaded: ReleaseFacts, signed: tuple[Path, TrustSettings], clock: Clock, tmp_path: Path
) -> None:
    shutil.rmtree(loaded.path)
    clock.now += 300
    recheck.turn()
    assert not recheck.intact
    shutil.copytree(signed[0], tmp_path / "next")
    recheck.watch(load_release_dir(tmp_path / "next", trust=signed[1]).facts)
    assert recheck.intact
    clock.now += 300
    recheck.turn()
    assert metrics(recheck) == {"release_differences_total": 1, "release_intact": 1}


def test_nothing_is_due_before_something_is_watched_or_if_both_are_off(
    signed: tuple[Path, TrustSettings], loaded: ReleaseFacts, clock: Clock
) -> None:
    recheck = Recheck(trust=signed[1], recheck_s=0, rehash_s=0, unready=True, clock=clock, wait=clock.wait)
    assert recheck.turn() is None
    assert recheck.ready
    recheck.watch(loaded)
    shutil.rmtree(loaded.path)
    clock.now += 1e9
    assert recheck.turn() is None
    assert recheck.intact


def scripted(calls: list[str], look: Callable[[Pace], Rehash]) -> Callable[[ReleaseFacts, Pace], Rehash]:
    def full_look(facts: ReleaseFacts, pace: Pace) -> Rehash:
        calls.append(facts.digest)
        return look(pace)

    return full_look


def test_a_swap_in_the_middle_of_a_full_look_ends_it_and_its_result_counts_for_nothing(
    signed: tuple[Path, TrustSettings], loaded: ReleaseFacts, clock: Clock
) -> None:
    bad = (Difference("tokenizer.json", "this", "that"),)

    def swapped(pace: Pace) -> Rehash:
        recheck.watch(loaded)
        return Rehash(bad, loaded)

    recheck = Recheck(
        trust=signed[1], recheck_s=0, rehash_s=10, unready=True, clock=clock, wait=clock.wait,
        full_look=scripted([], swapped),
    )  # fmt: skip
    recheck.watch(loaded)
    clock.now += 10
    recheck.turn()
    assert recheck.intact


def test_the_thread_looks_is_woken_by_a_swap_and_ends_in_the_middle_of_a_look(
    signed: tuple[Path, TrustSettings], loaded: ReleaseFacts, caplog: pytest.LogCaptureFixture
) -> None:
    """With a real clock and a real wait: a read that would take hours is given up at once."""
    looking = threading.Semaphore(0)
    calls: list[str] = []

    def endless(pace: Pace) -> Rehash:
        looking.release()
        pace(10**12)
        raise AssertionError("nobody woke it")

    recheck = Recheck(
        trust=signed[1], recheck_s=0, rehash_s=1e-9, unready=True, full_look=scripted(calls, endless)
    )
    recheck.start()
    for _ in range(3):
        recheck.watch(loaded)
        assert looking.acquire(timeout=20)
    recheck.close()
    recheck.close()
    assert "recheck" not in {thread.name for thread in threading.enumerate()}
    assert len(calls) >= 3
    assert caplog.text == ""


def test_a_look_that_fails_is_logged_and_the_next_one_is_made(
    signed: tuple[Path, TrustSettings], loaded: ReleaseFacts, caplog: pytest.LogCaptureFixture
) -> None:
    calls = threading.Semaphore(0)

    def broken(facts: ReleaseFacts) -> tuple[Difference, ...]:
        calls.release()
        raise ZeroDivisionError("a bug")

    recheck = Recheck(trust=signed[1], recheck_s=1e-9, rehash_s=0, unready=True, compare=broken)
    recheck.watch(loaded)
    recheck.start()
    for _ in range(2):
        assert calls.acquire(timeout=20)
    recheck.close()
    assert "could not be looked at" in caplog.text
    assert "a bug" in caplog.text
