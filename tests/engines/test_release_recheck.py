"""Looking again at a loaded release's folder: what is found, how fast it reads, and what it keeps."""

import gc
import os
import tracemalloc
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.loading import ReleaseFacts, inspect_release, load_release, load_release_dir
from engines.publishing import publish_release
from engines.recheck import Difference, Pace, compare_release, rehash_release
from engines.release_folder import ReleaseFolder
from engines.signing import sign_release
from tests.engines.conftest import TINY_FILES, Keys, refusal

WriteRelease = Callable[..., Path]


class Clock:
    """Moves only while somebody pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def pace(clock: Clock | None = None, rate: float = 1e9) -> Pace:
    clock = clock or Clock()
    return Pace(rate, clock=clock, pause=clock.pause)


@pytest.fixture
def facts(version: Path, keys: Keys) -> ReleaseFacts:
    return load_release(version, model="tiny", trust=keys.trust).facts


def full(facts: ReleaseFacts, keys: Keys) -> tuple[Difference, ...]:
    return rehash_release(facts, trust=keys.trust, pace=pace()).differences


def test_an_untouched_release_differs_in_nothing(facts: ReleaseFacts, keys: Keys, served: Path) -> None:
    assert facts.path == served
    assert facts.digest == served.name
    assert facts.files.keys() == {*TINY_FILES, "engine.json", "model.sig"}
    assert facts.nbytes == sum(path.stat().st_size for path in served.iterdir())
    assert compare_release(facts) == ()
    seen = rehash_release(facts, trust=keys.trust, pace=pace())
    assert (seen.differences, seen.facts) == ((), facts)


def test_inspecting_takes_the_same_facts_without_reading_the_weights(
    facts: ReleaseFacts, version: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    readv = os.readv

    def record(fd: int, buffers: list[memoryview]) -> int:
        read.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", record)
    inspected = inspect_release(version, facts.digest, model="tiny", trust=keys.trust)
    assert inspected.facts == facts
    assert set(read) == {"engine.json", "model.sig"}


def test_inspecting_compares_sizes(version: Path, served: Path, keys: Keys) -> None:
    os.truncate(served / "model.onnx.data", 5)
    error = refusal(lambda: inspect_release(version, served.name, model="tiny", trust=keys.trust))
    assert (error.step, error.found) == ("files", "5 bytes")


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json", "model.sig"])
@pytest.mark.parametrize("how", ["written", "touched", "replaced by an equal one"])
def test_the_quick_look_sees_size_time_and_inode(
    facts: ReleaseFacts, served: Path, name: str, how: str
) -> None:
    path = served / name
    if how == "written":
        with path.open("ab") as file:
            file.write(b"x")
        os.utime(path, ns=(0, facts.files[name].status.mtime_ns))
    elif how == "touched":
        os.utime(path, ns=(0, 1))
    else:
        copy = served.parent / "copy"
        copy.write_bytes(path.read_bytes())
        os.utime(copy, ns=(0, facts.files[name].status.mtime_ns))
        copy.replace(path)
    (difference,) = compare_release(facts)
    assert difference.file == name
    assert difference.expected == str(facts.files[name].status)
    assert difference.found != difference.expected
    assert str(difference) == f"{name}: expected {difference.expected}, found {difference.found}"


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
def test_the_full_look_sees_one_byte(facts: ReleaseFacts, served: Path, keys: Keys, name: str) -> None:
    data = bytearray((served / name).read_bytes())
    data[-1] ^= 1
    (served / name).write_bytes(data)
    (difference,) = full(facts, keys)
    assert (difference.file, difference.expected) == (name, f"SHA-256 {facts.files[name].sha256}")


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder", "missing"])
def test_both_looks_open_nothing_but_a_regular_file(
    facts: ReleaseFacts, served: Path, keys: Keys, tmp_path: Path, kind: str
) -> None:
    real = (served / "tokenizer.json").rename(tmp_path / "real")
    if kind == "symlink":
        (served / "tokenizer.json").symlink_to(real)
    elif kind == "fifo":
        os.mkfifo(served / "tokenizer.json")
    elif kind == "folder":
        (served / "tokenizer.json").mkdir()
    for (difference,) in (compare_release(facts), full(facts, keys)):
        assert difference.file == "tokenizer.json"
        assert {"missing": "no such file"}.get(kind, kind) in difference.found.lower()


@pytest.mark.parametrize("gone", ["removed", "a link", "a file"])
def test_a_folder_that_is_none_any_more_is_one_difference(
    facts: ReleaseFacts, served: Path, keys: Keys, gone: str
) -> None:
    elsewhere = served.rename(served.parent / "elsewhere")
    if gone == "a link":
        served.symlink_to(elsewhere)
    elif gone == "a file":
        served.write_text("")
    for (difference,) in (compare_release(facts), full(facts, keys)):
        assert difference.file == str(served)


@pytest.mark.parametrize("name", ["extra", ".hidden", "new\nline", "ü"])
def test_what_was_not_there_is_named_on_one_line(
    facts: ReleaseFacts, served: Path, keys: Keys, name: str
) -> None:
    (served / name).mkdir()
    for (difference,) in (compare_release(facts), full(facts, keys)):
        assert difference.file == ascii(name)


def test_a_new_signature_by_a_trusted_key_is_no_difference_to_the_full_look(
    facts: ReleaseFacts, served: Path, keys: Keys, other_keys: Keys
) -> None:
    sign_release(served, other_keys.private)
    assert [one.file for one in compare_release(facts)] == ["model.sig"]
    assert [one.file for one in full(facts, keys)] == ["model.sig"]  # not a key that is trusted
    seen = rehash_release(facts, trust=other_keys.trust, pace=pace())
    assert seen.differences == ()
    assert compare_release(seen.facts) == ()


def test_the_signature_of_another_release_is_a_difference(
    facts: ReleaseFacts, served: Path, keys: Keys, write_release: WriteRelease
) -> None:
    other = write_release("other", release=9)
    (served / "model.sig").write_bytes((other / "model.sig").read_bytes())
    (difference,) = full(facts, keys)
    assert (difference.file, difference.found) == ("model.sig", "one over others")


def test_a_release_published_again_over_a_damaged_copy_is_as_it_was_loaded(
    tmp_path: Path, write_release: WriteRelease, keys: Keys
) -> None:
    folder, version = write_release("again"), tmp_path / "served-again" / "1"
    publish_release(folder, version, model="tiny", trust=keys.trust)
    facts = load_release(version, model="tiny", trust=keys.trust).facts
    (facts.path / "tokenizer.json").unlink()
    publish_release(folder, version, model="tiny", trust=keys.trust)
    assert len(compare_release(facts)) == len(facts.files)  # every inode is another
    seen = rehash_release(facts, trust=keys.trust, pace=pace())
    assert seen.differences == ()
    assert compare_release(seen.facts) == ()


def test_a_full_look_keeps_its_pace_and_tells_how_far_it_is(
    write_release: WriteRelease, keys: Keys, tmp_path: Path
) -> None:
    folder = write_release("large", files=TINY_FILES | {"zz.data": bytes(5 << 20)})
    version = tmp_path / "large-served" / "1"
    publish_release(folder, version, model="tiny", trust=keys.trust)
    facts = load_release(version, model="tiny", trust=keys.trust).facts
    clock, read = Clock(), dict.fromkeys(facts.files, 0)

    def on_bytes(name: str, nbytes: int) -> None:
        read[name] += nbytes

    rehash_release(facts, trust=keys.trust, pace=pace(clock, rate=1e6), on_bytes=on_bytes)
    expected = {name: file.status.size for name, file in facts.files.items()} | {"model.sig": 0}
    assert read == expected
    assert clock.now == pytest.approx(sum(expected.values()) / 1e6)
    assert max(clock.pauses) <= 1.05 * (1 << 20) / 1e6  # in small pieces, so that it can be ended soon


def test_time_that_was_not_used_is_not_made_up_for() -> None:
    clock = Clock()
    held = pace(clock, rate=100)
    held(100)
    clock.now += 1000  # a disk that stalled, a machine that slept
    held(100)
    held(100)
    assert clock.pauses == [1, 1, 1]


def test_a_full_look_needs_one_small_buffer_and_leaves_no_file_open(
    write_release: WriteRelease, keys: Keys, tmp_path: Path
) -> None:
    folder = write_release("large", files=TINY_FILES | {"zz.data": bytes(32 << 20)})
    version = tmp_path / "large-served" / "1"
    publish_release(folder, version, model="tiny", trust=keys.trust)
    facts = load_release(version, model="tiny", trust=keys.trust).facts
    full(facts, keys)
    fds = len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    for _ in range(3):
        assert full(facts, keys) == ()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_pause_that_raises_ends_the_reading_with_nothing_open(facts: ReleaseFacts, keys: Keys) -> None:
    class Enough(Exception):
        pass

    def stop(seconds: float) -> None:
        raise Enough

    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Enough):
        rehash_release(facts, trust=keys.trust, pace=Pace(1e9, clock=Clock(), pause=stop))
    assert len(os.listdir("/proc/self/fd")) == fds


def test_how_folders_are_opened_can_be_replaced(facts: ReleaseFacts, served: Path, keys: Keys) -> None:
    opened = []

    @contextmanager
    def elsewhere(path: Path):  # type: ignore[no-untyped-def]
        opened.append(path)
        with ReleaseFolder.open(moved) as folder:
            yield folder

    moved = served.rename(served.parent / "moved")
    assert compare_release(facts, folders=elsewhere) == ()
    assert rehash_release(facts, trust=keys.trust, pace=pace(), folders=elsewhere).differences == ()
    assert opened == [served, served]


def test_a_file_that_grows_while_it_is_read_is_a_difference(
    facts: ReleaseFacts, served: Path, keys: Keys
) -> None:
    def grow(seconds: float) -> None:
        with (served / "tokenizer.json").open("ab") as file:
            file.write(b"x")

    seen = rehash_release(facts, trust=keys.trust, pace=Pace(1e9, clock=Clock(), pause=grow))
    assert [one.file for one in seen.differences] == ["tokenizer.json"]


def test_facts_that_are_kept_hold_no_bytes_of_the_release(write_release: WriteRelease, keys: Keys) -> None:
    folder = write_release("large", files=TINY_FILES | {"zz.data": bytes(32 << 20)})
    load_release_dir(folder, trust=keys.trust)  # whatever is loaded and cached once
    tracemalloc.start()
    facts = load_release_dir(folder, trust=keys.trust).facts
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1 << 20
    assert facts.nbytes > 32 << 20
