"""Tag secrets that come, grow old and go while caches are open: which one seals, and which still open."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import cachemgr.cache
from cachemgr import CacheSecrets, SecretsError, complete_secrets, list_tag_keys, prune_tag_keys
from cachemgr.rotation import Rotation
from cachemgr.shard import HEADER_DTYPE, HEADER_NBYTES, ShardOpener, ShardSealer, Verdict, address_of
from scripts.cli import main
from tests.cachemgr.host import FORMAT, Host, chain, fill, read
from tests.waiting import wait_until

GRACE_S = 100.0
START = 1_000_000.0


class Folder:
    """A folder of secrets and the time that the processes using it agree on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = START
        self.add()

    def add(self) -> None:
        """Make what is missing, or else a newer tag secret, now."""
        for path in complete_secrets(self.path, rotate=(self.path / "naming.key").exists()):
            os.utime(path, (self.now, self.now))

    def put(self, name: str, text: str, *, mode: int = 0o600) -> None:
        """As a careless copy would: in place."""
        (self.path / name).write_text(text)
        (self.path / name).chmod(mode)
        os.utime(self.path / name, (self.now, self.now))

    def load(self) -> CacheSecrets:
        return CacheSecrets.load(self.path, grace_s=GRACE_S, clock=lambda: self.now)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "secrets")


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refresher never wakes up by itself."""
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 3600.0)


def key_ids_in(host: Host) -> set[int]:
    """Of every shard in the arenas."""
    found: set[int] = set()
    for arena in host.arenas():
        slots = np.fromfile(arena, np.uint8).reshape(-1, HEADER_NBYTES + FORMAT.payload_nbytes)
        headers = slots[:, :HEADER_NBYTES].copy().view(HEADER_DTYPE)[:, 0]
        found |= set(headers["key_id"][headers["length"] > 0].tolist())
    return found


def test_a_quiet_folder_changes_nothing(folder: Folder) -> None:
    rotation = Rotation(folder.load())
    assert [rotation.look() for _ in range(3)] == [None] * 3
    assert Rotation(CacheSecrets(bytes(32), {1: bytes(32)})).look() is None


def test_a_new_key_seals_and_the_old_one_is_read_for_its_grace(folder: Folder) -> None:
    rotation, first = Rotation(folder.load()), folder.load().tags[1]
    folder.add()
    tags = rotation.look()
    assert tags is not None
    assert sorted(tags) == [1, 2]
    assert tags[1] == first
    folder.now += GRACE_S - 0.1
    assert rotation.look() is None
    folder.now += 0.1
    tags = rotation.look()
    assert tags is not None
    assert sorted(tags) == [2]
    assert sorted(folder.load().tags) == [2], "a process that starts now agrees"


def test_a_file_that_vanished_is_forgotten_at_once(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    folder.add()
    rotation = Rotation(folder.load())
    (folder.path / "tag-2.key").unlink()
    assert rotation.look() == {1: folder.load().tags[1]}, "the one before it seals again"
    (folder.path / "tag-1.key").unlink()
    assert rotation.look() == {}
    assert rotation.look() is None
    assert caplog.text.count("no tag secret is left") == 1
    folder.add()
    assert sorted(rotation.look() or {}) == [1]


@pytest.mark.parametrize(
    ("text", "mode", "trouble"),
    [
        ("", 0o600, "found an empty file"),
        ("ab" * 31, 0o600, "62 bytes of something else"),
        ("ab" * 32, 0o644, "found 0644"),
    ],
)
def test_a_file_that_cannot_be_used_yet_changes_nothing_and_is_said_once(
    folder: Folder, caplog: pytest.LogCaptureFixture, text: str, mode: int, trouble: str
) -> None:
    rotation = Rotation(folder.load())
    folder.put("tag-2.key", text, mode=mode)
    assert [rotation.look() for _ in range(3)] == [None] * 3
    assert caplog.text.count(trouble) == 1
    assert "ab" * 16 not in caplog.text
    folder.put("tag-2.key", "cd" * 32)
    assert rotation.look() == {1: folder.load().tags[1], 2: bytes.fromhex("cd" * 32)}


def test_a_file_that_breaks_while_it_is_in_use_stays_in_use(folder: Folder) -> None:
    for looks in (0, 1):  # before its first look a rotation knows what the cache was opened with
        folder.put("tag-1.key", "ab" * 32)
        rotation = Rotation(folder.load())
        assert [rotation.look() for _ in range(looks)] == [None] * looks
        folder.put("tag-1.key", "")
        assert rotation.look() is None
        folder.put("tag-2.key", "cd" * 32)
        assert rotation.look() == {1: bytes.fromhex("ab" * 32), 2: bytes.fromhex("cd" * 32)}
        (folder.path / "tag-2.key").unlink()


def test_a_folder_that_cannot_be_trusted_changes_nothing(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    rotation = Rotation(folder.load())
    folder.add()
    folder.path.chmod(0o777)
    assert [rotation.look() for _ in range(3)] == [None] * 3
    assert caplog.text.count("writable by no one else") == 1
    folder.path.chmod(0o700)
    assert sorted(rotation.look() or {}) == [1, 2]
    folder.path.rename(folder.path.with_name("gone"))
    assert rotation.look() is None
    folder.now += GRACE_S
    assert sorted(rotation.look() or {}) == [2], "grace ends all the same"


@pytest.mark.usefixtures("by_hand")
def test_an_open_cache_seals_with_the_new_key_and_reads_the_old_one_for_its_grace(
    host: Host, folder: Folder
) -> None:
    cache = host.open(secrets=folder.load())
    old, new = chain(cache, 3), chain(cache, 3, seed=1)
    fill(cache, old)
    assert key_ids_in(host) == {1}
    folder.add()
    cache._follow_secrets()
    fill(cache, new)
    assert key_ids_in(host) == {1, 2}
    assert (read(cache, old), read(cache, new)) == (3, 3)
    folder.now += GRACE_S
    cache._follow_secrets()
    assert (read(cache, old), read(cache, new)) == (0, 3)
    counts = cache.counters()
    assert counts["cache_unreadable_blocks_total"] == 3
    assert counts["cache_corrupt_blocks_total"] == 0
    assert key_ids_in(host) == {1, 2}, "not removed: somebody else may read them"
    assert fill(cache, old) == 3
    assert read(cache, old) == 3
    cache.check_integrity()


@pytest.mark.usefixtures("by_hand")
def test_a_process_that_has_no_new_key_yet_misses_and_later_reads(host: Host, tmp_path: Path) -> None:
    """Two processes of a node, each with a copy of the secrets; the second one's is late."""
    early, late = Folder(tmp_path / "early"), Folder(tmp_path / "late")
    for name in ("naming.key", "tag-1.key"):
        late.put(name, (early.path / name).read_text())
    writer, reader = host.open(secrets=early.load()), host.open(secrets=late.load(), blocks=64)
    early.add()
    writer._follow_secrets()
    names = chain(writer, 3)
    assert names == chain(reader, 3)
    fill(writer, names)
    reader.acquire(names, deadline=None).release()
    reader._refresh_arenas()
    assert read(reader, names) == 0
    assert read(writer, names) == 3
    late.put("tag-2.key", (early.path / "tag-2.key").read_text())
    reader._follow_secrets()
    reader._refresh_arenas()
    assert read(reader, names) == 3
    assert reader.counters()["cache_corrupt_blocks_total"] == 0


@pytest.mark.usefixtures("by_hand")
def test_without_any_tag_secret_nothing_is_cached_until_there_is_one(host: Host, folder: Folder) -> None:
    cache = host.open(secrets=folder.load())
    names, kept = chain(cache, 3), (folder.path / "tag-1.key").read_text()
    fill(cache, names)
    (folder.path / "tag-1.key").unlink()
    cache._follow_secrets()
    fill(cache, chain(cache, 2, seed=1))
    assert read(cache, chain(cache, 2, seed=1)) == read(cache, names) == 0
    folder.put("tag-1.key", kept)
    cache._follow_secrets()
    fill(cache, names)
    assert read(cache, names) == 3
    cache.check_integrity()


def test_a_running_cache_follows_by_itself(
    host: Host, folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 0.005)
    caplog.set_level(logging.INFO)
    cache = host.open(secrets=folder.load())
    folder.add()
    wait_until(lambda: "blocks are sealed with key id 2; of the older ones 1 is read" in caplog.text)
    fill(cache, chain(cache, 1))
    wait_until(lambda: key_ids_in(host) == {2})
    for secret in folder.load().tags.values():
        assert secret.hex() not in caplog.text


def test_a_running_process_follows_the_command(host: Host, tmp_path: Path) -> None:
    """No restart, no signal: it seals with what `tensorcache secret` made, and still reads what it had."""
    secrets = tmp_path / "secrets"
    assert main(["secret", "new", str(secrets)]) == 0
    command = [sys.executable, "-m", "tests.cachemgr.rotating_process", str(host.directory), str(secrets)]
    root, pipe = Path(__file__).resolve().parents[2], subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            assert int(process.stdout.readline()) == 2
            assert key_ids_in(host) == {1}
            assert main(["secret", "new", str(secrets), "--rotate"]) == 0

            def commit_one_more() -> bool:
                assert process.stdin
                assert process.stdout
                process.stdin.write("more\n")
                process.stdin.flush()
                assert int(process.stdout.readline()) == 2
                return key_ids_in(host) == {1, 2}

            wait_until(commit_one_more)
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.usefixtures("by_hand")
def test_no_nonce_is_used_twice_while_keys_change_under_the_writer(
    host: Host, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 3600.0)  # one thread looks: ours
    cache = host.open(blocks=600, secrets=folder.load())
    names = chain(cache, 500)
    done, rotated = threading.Event(), threading.Event()

    def rotate() -> None:
        while not done.is_set():
            folder.add()
            cache._follow_secrets()
            rotated.set()

    rotating = threading.Thread(target=rotate)
    fill(cache, names[:100])
    rotating.start()
    assert rotated.wait(60)
    fill(cache, names)
    done.set()
    rotating.join()
    slots = np.fromfile(host.arenas()[0], np.uint8).reshape(-1, HEADER_NBYTES + FORMAT.payload_nbytes)
    headers = slots[:, :HEADER_NBYTES].copy().view(HEADER_DTYPE)[:, 0]
    headers = headers[headers["length"] > 0]
    nonces = {(bytes(row["session"]), int(row["sequence"])) for row in headers}
    keys_of = {(bytes(row["session"]), int(row["key_id"])) for row in headers}
    assert len(nonces) == len(headers) == 500
    assert len(keys_of) == len({session for session, _ in keys_of}) > 1, "a session is of one key"
    assert read(cache, names) == 500


def test_what_opens_changes_for_whole_calls(folder: Folder) -> None:
    """A check that is under way when its key goes ends as it began; the next one is a miss."""
    tags = folder.load().tags
    opener, address = ShardOpener(FORMAT, tags), address_of(chain_names(), 0)
    payload = np.zeros(FORMAT.payload_nbytes, np.uint8)
    header = ShardSealer(FORMAT, tags).seal(address, payload)
    check = opener.begin(header, address)
    assert not isinstance(check, Verdict)
    opener.use({2: bytes(32)})
    check.update(payload.data)
    assert check.passed()
    assert opener.begin(header, address) is Verdict.UNREADABLE
    opener.use({1: bytes(32)})
    wrong = opener.begin(header, address)
    assert not isinstance(wrong, Verdict)
    wrong.update(payload.data)
    assert not wrong.passed(), "a key that was kept for the session would have passed"


def chain_names() -> list[bytes]:
    return [bytes([row + 1]) * 16 for row in range(3)]


def test_list_says_what_each_key_does(folder: Folder) -> None:
    folder.now += 50
    folder.add()
    folder.put("tag-3.key", "half")
    first, second, broken = list_tag_keys(folder.path, grace_s=GRACE_S)
    assert (first.key_id, first.sealing, first.expires) == (1, False, START + 50 + GRACE_S)
    assert (second.key_id, second.sealing, second.expires) == (2, True, float("inf"))
    assert (broken.key_id, broken.sealing) == (3, False)
    assert "4 bytes of something else" in broken.trouble
    with pytest.raises(SecretsError, match="cannot be read"):
        list_tag_keys(folder.path / "nowhere")


def test_prune_takes_what_is_past_its_grace_and_never_the_newest(folder: Folder) -> None:
    folder.add()
    folder.now += 10
    folder.add()
    folder.put("tag-9.key", "half")

    def prune(now: float) -> list[str]:
        return [path.name for path in prune_tag_keys(folder.path, grace_s=GRACE_S, now=now)]

    assert prune(START + GRACE_S - 1) == []
    assert prune(START + GRACE_S) == ["tag-1.key"]
    assert prune(1e12) == ["tag-2.key"]
    assert prune(1e12) == []
    assert sorted(path.name for path in folder.path.iterdir()) == ["naming.key", "tag-3.key", "tag-9.key"]


def test_a_fault_of_ours_does_not_end_the_looking(
    host: Host, folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that follows secrets also takes over arenas: it must outlive whatever one look raises."""
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 0.005)
    looks: list[int] = []

    def look(_: Rotation) -> None:
        looks.append(1)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Rotation, "look", look)
    host.open(secrets=folder.load())
    wait_until(lambda: len(looks) > 3)
    assert "a fault of ours" in caplog.text
