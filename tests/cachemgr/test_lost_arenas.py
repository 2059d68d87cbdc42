"""Arenas that something which is no cache deletes or cuts under a working process: replaced, said once."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

import cachemgr.cache
from cachemgr.contract import NamespaceShare
from cachemgr.host_tier import HostTier
from cachemgr.shard import slot_nbytes
from tests.cachemgr.host import FORMAT, Host, chain, fill, payload_of, read
from tests.cachemgr.test_processes import held_in
from tests.waiting import wait_until

STRIDE = slot_nbytes(FORMAT.payload_nbytes)

Harm = Callable[[Path], None]


def cut(path: Path) -> None:
    os.truncate(path, 0)


def cut_to_three(path: Path) -> None:
    os.truncate(path, 3 * STRIDE)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.touch(mode=0o644)  # no arena can be readable by others: it is refused, and left alone
    other.rename(path)


harms = pytest.mark.parametrize("harm", [cut, cut_to_three, Path.unlink, replace])


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas are looked at only when the test says so."""
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 3600.0)


@harms
def test_a_lost_arena_is_replaced_and_said_each_time_it_happens(
    host: Host, frozen: None, harm: Harm, caplog: pytest.LogCaptureFixture
) -> None:
    cache = host.open(blocks=12)
    hashes = chain(cache, 9)
    for times in range(1, 4):
        assert fill(cache, hashes) == 9
        harm(host.arenas()[0] if harm is not replace else host.arenas()[-1])
        assert read(cache, hashes) == (0 if harm in (cut, cut_to_three) else 9), "until it is noticed"
        cache._refresh_arenas()
        counts = cache.counters()
        assert (counts["cache_arenas"], counts["cache_slots"]) == (1, 12)
        assert counts["cache_bytes"] == 12 * STRIDE
        assert counts["cache_resident_blocks"] == counts["cache_pins"] == cache.lookup(hashes) == 0
        assert counts["cache_lost_arenas_total"] == times
        assert caplog.text.count("arena lost: ") == times
        cache.check_integrity()
        cache._refresh_arenas()
    lines = [line for line in caplog.messages if not line.startswith("arena refused")]
    assert len(lines) == 3, "nothing else is said but that the replaced name cannot be used"
    assert not [line for line in held_in(host.directory) if "(deleted)" in line], "its memory is free"
    assert fill(cache, hashes) == 9
    assert read(cache, hashes) == 9
    cache.close()
    assert read(host.open(blocks=12), hashes) == 9


@harms
def test_the_thread_notices_without_a_request(
    host: Host, monkeypatch: pytest.MonkeyPatch, harm: Harm
) -> None:
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 0.01)
    cache = host.open(blocks=12)
    hashes = chain(cache, 9)
    fill(cache, hashes)
    harm(host.arenas()[0])
    wait_until(lambda: cache.counters()["cache_lost_arenas_total"] == 1)
    assert cache.counters()["cache_slots"] == 12
    assert fill(cache, hashes) == 9
    assert read(cache, hashes) == 9


@harms
def test_leases_and_reservations_of_a_lost_arena_are_misses(host: Host, frozen: None, harm: Harm) -> None:
    cache = host.open(blocks=8)
    hashes = chain(cache, 8)
    fill(cache, hashes[:6])
    lease = cache.acquire(hashes, deadline=None)
    late, given_up = cache.prepare(hashes, 6), cache.prepare(hashes, 7)
    assert late is not None
    assert given_up is not None
    harm(host.arenas()[0])
    cache._refresh_arenas()
    newer = chain(cache, 8, seed=1)
    assert fill(cache, newer) == 8, "no slot waits for those who hold the old ones"
    if harm in (Path.unlink, replace):
        late.payload[:] = payload_of(hashes[6])  # into memory that is not lost under it
    cache.commit(late)
    cache.abort(given_up)
    seen: list[range] = []
    assert cache.restore(lease, first=0, sink=lambda blocks, _: seen.append(blocks)) == 0
    assert cache.restore(lease, first=2, sink=lambda blocks, _: seen.append(blocks)) == 2
    lease.release()
    assert not seen
    assert cache.lookup(hashes) == 0
    assert cache.counters()["cache_pins"] == 0
    cache.check_integrity()
    assert read(cache, newer) == 8
    assert cache.counters()["cache_corrupt_blocks_total"] == 0
    del late, given_up
    assert not [line for line in held_in(host.directory) if "(deleted)" in line]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_the_arenas_that_are_left_keep_their_blocks(host: Host, frozen: None, which: int, harm: Harm) -> None:
    cache = host.open(blocks=32)
    first = chain(cache, 30)
    fill(cache, first)
    cache.close()
    cache = host.open(blocks=64)
    second = chain(cache, 30, seed=1)
    assert fill(cache, second) == 30
    assert cache.counters()["cache_arenas"] == 2
    lease = cache.acquire(second, deadline=None)
    before = sum(cache.lookup(hashes) for hashes in (first, second))
    assert before == 60
    harm(host.arenas()[which])
    cache._refresh_arenas()
    counts = cache.counters()
    assert (counts["cache_arenas"], counts["cache_slots"]) == (2, 64)
    assert counts["cache_resident_blocks"] >= 28
    assert read(cache, (second, first)[which]) >= 28
    lease.release()
    fill(cache, first)
    fill(cache, second)
    assert [read(cache, hashes) for hashes in (first, second)] == [30, 30]
    cache.check_integrity()
    assert sum(path.stat().st_size for path in host.arenas()) == 64 * STRIDE


def test_others_let_go_of_an_arena_that_its_writer_replaced(host: Host, frozen: None) -> None:
    first, second = (host.open(blocks=32, arena_bytes=16 * STRIDE) for _ in range(2))
    hashes = chain(first, 5)
    fill(first, hashes)
    second.lookup(hashes)
    second._refresh_arenas()
    assert read(second, hashes) == 5
    cut(host.arenas()[0])
    first._refresh_arenas()
    assert fill(first, hashes[:4]) == 4
    second._refresh_arenas()
    assert read(second, hashes) == 4
    assert second.counters()["cache_foreign_arenas"] == 1


def test_a_directory_that_vanishes_is_a_miss_until_it_is_back(host: Host, frozen: None) -> None:
    cache = host.open(blocks=8)
    hashes = chain(cache, 4)
    fill(cache, hashes)
    (path,) = host.arenas()
    path.unlink()
    host.directory.rmdir()
    cache._refresh_arenas()
    assert cache.counters()["cache_slots"] == 0
    assert fill(cache, hashes) == read(cache, hashes) == 0
    host.directory.mkdir(mode=0o700)
    cache._refresh_arenas()
    assert fill(cache, hashes) == 4
    assert read(cache, hashes) == 4


def test_what_changes_while_a_lost_arena_is_replaced_holds_for_its_successor(
    host: Host, frozen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = host.open(blocks=8)
    made = cache._new_tier
    change = Thread(target=cache.set_shares, args=({"a": NamespaceShare()},))

    def slowly() -> HostTier:
        tier = made()
        change.start()
        change.join(0.2)  # it waits for us; had it not to, it would be done by now
        return tier

    monkeypatch.setattr(cache, "_new_tier", slowly)
    cut(host.arenas()[0])
    cache._refresh_arenas()
    change.join()
    assert cache.usage() == {"a": 0, "": 0}
