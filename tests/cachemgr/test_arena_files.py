"""Arena files: names, owners, bounds, full memory, and what is deleted."""

import errno
import logging
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachemgr import BlockFormat, HostCache
from cachemgr.arena import create_locked, open_locked
from cachemgr.arena_files import ArenaFiles, geometry_digest
from cachemgr.shard import slot_nbytes
from tests.cachemgr.host import FORMAT, Host, chain, fill, read

STRIDE = slot_nbytes(FORMAT.payload_nbytes)
WIDER = BlockFormat(FORMAT.kv_identity, "float32", layers=3, kv_heads=1, head_dim=4, block_tokens=4)


def slots(cache: HostCache) -> int:
    return int(cache.counters()["cache_slots"])


def test_the_name_says_whose_it_is_and_nobody_else_can_read_it(host: Host) -> None:
    host.open(cluster="eu.prod", node="gpu-7")
    (path,) = host.arenas()
    assert path.name == f"tensorcache_eu.prod_gpu-7_v1_{geometry_digest(FORMAT)}_0.arena"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == 64 * STRIDE


def test_the_mode_does_not_depend_on_the_umask(host: Host) -> None:
    before = os.umask(0o277)
    try:
        host.open()
    finally:
        os.umask(before)
    assert stat.S_IMODE(host.arenas()[0].stat().st_mode) == 0o600


def test_every_byte_is_backed_by_memory(host: Host) -> None:
    host.open(blocks=1000)
    info = host.arenas()[0].stat()
    assert info.st_blocks * 512 >= info.st_size


def test_a_file_left_sparse_by_a_crash_is_backed_when_it_is_taken_over(host: Host) -> None:
    host.open().close()
    (path,) = host.arenas()
    os.truncate(path, 0)
    os.truncate(path, 64 * STRIDE)
    assert path.stat().st_blocks == 0
    cache = host.open()
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    assert fill(cache, chain(cache, 5)) == 5


def test_an_empty_file_left_by_a_crash_is_replaced(host: Host) -> None:
    host.open().close()
    (path,) = host.arenas()
    os.truncate(path, 0)
    assert slots(host.open()) == 64
    assert len(host.arenas()) == 1


def hard_link(path: Path) -> None:
    os.link(path, path.with_name("second-name"))


def symlink(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def readable_by_group(path: Path) -> None:
    path.chmod(0o640)


def another_owner(path: Path) -> None:
    os.chown(path, 12345, 12345)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing a file's owner takes root")


@pytest.mark.parametrize(
    "tamper",
    [symlink, hard_link, fifo, directory, readable_by_group, pytest.param(another_owner, marks=needs_root)],
)
def test_what_cannot_be_ours_is_refused_and_left_alone(
    host: Host, tamper: object, caplog: pytest.LogCaptureFixture
) -> None:
    cache = host.open()
    hashes = chain(cache, 3)
    fill(cache, hashes)
    cache.close()
    (path,) = host.arenas()
    tamper(path)  # type: ignore[operator]
    before = path.lstat()
    with caplog.at_level(logging.WARNING):
        cache = host.open(blocks=200)
    assert f"arena refused: {path}" in caplog.text
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_size) == (
        before.st_ino, before.st_mode, before.st_uid, before.st_size,
    )  # fmt: skip
    assert cache.lookup(hashes) == 0
    assert path.with_name(path.name.replace("_0.arena", "_1.arena")).exists(), "the next ordinal is used"
    assert fill(cache, hashes) == 3
    assert read(cache, hashes) == 3


def test_a_symlink_put_in_the_place_of_an_open_arena_is_never_followed(host: Host) -> None:
    cache = host.open()
    fill(cache, chain(cache, 3))
    (path,) = host.arenas()
    target = path.with_name("target")
    target.write_bytes(b"precious")
    path.unlink()
    path.symlink_to(target)
    assert read(cache, chain(cache, 3)) == 3, "the open file is still ours"
    cache.close()
    host.open()
    assert target.read_bytes() == b"precious"


def test_a_lowered_bound_cuts_what_is_there(host: Host) -> None:
    cache = host.open(blocks=64)
    hashes = chain(cache, 60)
    fill(cache, hashes)
    cache.close()
    smaller = host.open(blocks=16)
    assert slots(smaller) == 16
    assert host.arenas()[0].stat().st_size == 16 * STRIDE
    assert read(smaller, hashes) == smaller.lookup(hashes) <= 16
    smaller.check_integrity()


def test_arenas_beyond_a_lowered_bound_are_deleted(host: Host) -> None:
    first, second = host.open(arena_bytes=32 * STRIDE), host.open(arena_bytes=32 * STRIDE)
    assert len(host.arenas()) == 2
    first.close()
    second.close()
    assert slots(host.open(blocks=32)) == 32
    assert len(host.arenas()) == 1


def test_a_raised_bound_is_filled_by_another_arena(host: Host) -> None:
    cache = host.open(blocks=16)
    hashes = chain(cache, 10)
    fill(cache, hashes)
    cache.close()
    cache = host.open(blocks=64)
    assert slots(cache) == 64
    assert read(cache, hashes) == 10
    longer = chain(cache, 60)
    assert fill(cache, longer) == 50
    assert read(cache, longer) == 60
    cache.check_integrity()
    cache.close()
    assert read(host.open(blocks=64), longer) == 60


def test_what_was_found_at_start_goes_leaf_first_too(host: Host) -> None:
    cache = host.open(blocks=8)
    found = [chain(cache, 4, seed=seed) for seed in range(2)]
    for hashes in found:
        fill(cache, hashes)
    cache.close()
    cache = host.open(blocks=8)
    newer = chain(cache, 8, seed=2)
    for written in range(8):
        assert sum(cache.lookup(hashes) for hashes in found) == 8 - written
        assert fill(cache, newer[: written + 1]) == 1


def test_a_block_in_two_arenas_is_kept_once(host: Host) -> None:
    first, second = (host.open(arena_bytes=32 * STRIDE) for _ in range(2))
    hashes = chain(first, 4)
    for cache in (first, second):
        fill(cache, hashes)
        cache.close()
    both = host.open()
    assert read(both, hashes) == 4
    assert both.counters()["cache_resident_blocks"] == 4
    both.check_integrity()
    assert fill(both, chain(both, 60, seed=1)) == 60


@pytest.mark.parametrize("bytes_", [0, STRIDE - 1])
def test_no_room_at_all_switches_the_tier_off(
    host: Host, bytes_: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = host.open(blocks=0) if not bytes_ else host.open(arena_bytes=bytes_)
    assert slots(cache) == 0
    assert fill(cache, chain(cache, 2)) == 0
    assert read(cache, chain(cache, 2)) == 0
    assert host.arenas() == []
    said = f"host tier off: one block takes {STRIDE} bytes, this process may hold {STRIDE - 1}"
    assert caplog.messages == ([said] if bytes_ else []), "0 was meant, less than a block hardly"


def test_a_directory_that_is_not_there_switches_the_tier_off(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Host(host.directory / "missing").open()
    assert fill(cache, chain(cache, 2)) == 0
    cache.close()
    assert caplog.text.count("host tier off") == 1


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_tmpfs_shrinks_the_arena_with_one_line(
    small_tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_tmpfs / "others").write_bytes(bytes(400 << 10))
    host = Host(small_tmpfs)
    cache = host.open(blocks=(8 << 20) // STRIDE)
    assert caplog.text.count("host tier shrunk") == 1
    nbytes = cache.counters()["cache_bytes"]
    assert 300 << 10 < nbytes <= 624 << 10
    hashes = chain(cache, slots(cache))
    assert fill(cache, hashes) == slots(cache), "every slot can be written without a SIGBUS"
    assert read(cache, hashes) == slots(cache)
    host.close()


def test_a_tmpfs_without_any_room_is_survived(small_tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (small_tmpfs / "others").open("wb") as file, pytest.raises(OSError, match="No space"):
        file.write(bytes(2 << 20))
    host = Host(small_tmpfs)
    cache = host.open()
    assert fill(cache, chain(cache, 3)) == 0
    assert [path.name for path in host.arenas()] == ["others"]
    host.close()


def test_memory_that_cannot_be_reserved_shrinks_the_arena(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve, asked = os.posix_fallocate, []

    def refuse_large(fd: int, offset: int, length: int) -> None:
        asked.append(length)
        if length > 20 * STRIDE:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse_large)
    cache = host.open()
    assert 10 <= slots(cache) <= 20
    assert asked == sorted(asked, reverse=True)
    assert caplog.text.count("host tier shrunk") == 1
    assert host.arenas()[0].stat().st_size == slots(cache) * STRIDE
    assert fill(cache, chain(cache, 10)) == 10


def test_a_lock_has_one_holder(shared_memory: Path) -> None:
    path = str(shared_memory / "one.arena")
    holder = create_locked(path)
    assert holder is not None
    assert create_locked(path) is None
    assert open_locked(path) is None
    os.close(holder)
    again = open_locked(path)
    assert again is not None
    os.close(again)
    assert open_locked(str(shared_memory / "none.arena")) is None


def test_a_file_deleted_between_open_and_lock_is_not_taken(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_memory / "one.arena"
    fd = create_locked(str(path))
    assert fd is not None
    os.close(fd)
    monkeypatch.setattr("fcntl.flock", lambda *_: path.unlink())
    assert open_locked(str(path)) is None


def test_the_default_bound_leaves_room(host: Host) -> None:
    settings = host.settings(blocks=1)
    by_default = type(settings)(directory=settings.directory)
    files = ArenaFiles(FORMAT, by_default)
    space = os.statvfs(host.directory)
    assert 0 < files.bound <= min(8 << 30, space.f_bavail * space.f_frsize // 2 + (64 << 20))
