"""Real processes: two at once, one killed at any moment, one that takes over from another."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import cachemgr.cache
from cachemgr import BlockHash, HostCache
from cachemgr.shard import slot_nbytes
from tests.cachemgr.host import Host, chain, fill, payload_of, read
from tests.cachemgr.writer_process import BIG_FORMAT, CHAINS, LENGTH, ROOM, WriterProcess
from tests.waiting import wait_until

BOUND = ROOM * slot_nbytes(BIG_FORMAT.payload_nbytes)


@pytest.fixture
def start_writers(host: Host) -> Iterator[Callable[..., WriterProcess]]:
    started: list[WriterProcess] = []

    def start(**options: int) -> WriterProcess:
        started.append(WriterProcess(host, **options))
        return started[-1]

    yield start
    for writer in started:
        writer.close()


def open_big(host: Host, **others: object) -> HostCache:
    return host.open(blocks=ROOM, block_format=BIG_FORMAT, **others)


def restored(cache: HostCache, seed: int) -> int:
    """How many blocks of a chain come back; every byte checked."""
    hashes = chain(cache, LENGTH, seed=seed)
    lease = cache.acquire(hashes, deadline=None)

    def sink(blocks: range, payloads: Sequence[np.ndarray]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            assert payload.tobytes() == payload_of(hashes[block], BIG_FORMAT).tobytes()

    usable = cache.restore(lease, first=0, sink=sink)
    lease.release()
    return usable


def test_a_writer_killed_at_any_moment_leaves_only_whole_blocks(
    host: Host, start_writers: Callable[..., WriterProcess]
) -> None:
    writers, rng = start_writers(), random.Random(20240607)
    found = []
    for _ in range(50):
        victim = writers.start()
        time.sleep(rng.uniform(0, 0.01))  # the point is to hit any moment
        os.kill(victim, signal.SIGKILL)
        assert writers.wait() == -signal.SIGKILL
        cache = open_big(host)
        found.append(sum(restored(cache, seed) for seed in range(CHAINS)))
        assert cache.counters()["cache_corrupt_blocks_total"] == 0, "an unfinished block looks like none"
        cache.check_integrity()
        cache.close()
    assert min(found) >= LENGTH, "warm re-attach found nothing"
    assert len(host.arenas()) == 1


def test_a_second_process_writes_its_own_arena_within_the_same_bound(
    host: Host, start_writers: Callable[..., WriterProcess]
) -> None:
    writers = start_writers(arena_bytes=BOUND // 2)
    first = writers.start()
    cache = open_big(host, arena_bytes=BOUND * 3 // 4)
    assert [path.name[-8:] for path in host.arenas()] == ["_0.arena", "_1.arena"]
    assert sum(path.stat().st_size for path in host.arenas()) <= BOUND
    assert 0 < cache.counters()["cache_slots"] <= ROOM // 2
    hashes = chain(cache, 5, seed=77)
    assert fill_big(cache, hashes) == 5
    assert cache.lookup(hashes) == 5
    assert cache.counters()["cache_resident_blocks"] == 5, "the first process's blocks are its own"
    os.kill(first, signal.SIGKILL)
    writers.wait()
    cache.close()
    both = open_big(host)
    assert both.counters()["cache_arenas"] == 2
    assert both.lookup(hashes) == 5
    assert sum(restored(both, seed) for seed in range(CHAINS)) > 0
    both.check_integrity()


def fill_big(cache: HostCache, hashes: list[BlockHash]) -> int:
    written = 0
    for index in range(len(hashes)):
        pending = cache.prepare(hashes, index)
        if pending is not None:
            pending.payload[:] = payload_of(hashes[index], BIG_FORMAT)
            cache.commit(pending)
            written += 1
    return written


def test_a_process_without_an_arena_takes_over_the_one_of_a_process_that_dies(
    host: Host, start_writers: Callable[..., WriterProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload: the new process starts while the old one holds the whole bound."""
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 0.01)
    writers = start_writers()
    old = writers.start()
    new = open_big(host)
    assert new.counters()["cache_slots"] == 0
    assert new.prepare(chain(new, 1), 0) is None, "no room is a miss, not an error"
    assert new.counters()["cache_foreign_blocks"] > 0
    os.kill(old, signal.SIGKILL)
    writers.wait()
    wait_until(lambda: new.counters()["cache_reattached_blocks_total"] > 0)
    wait_until(lambda: new.counters()["cache_foreign_arenas"] == 0)
    assert sum(restored(new, seed) for seed in range(CHAINS)) >= LENGTH
    new.check_integrity()
    assert len(host.arenas()) == 1


def test_a_waiting_process_closes_at_once(host: Host) -> None:
    holder = host.open(blocks=4)
    waiting = host.open(blocks=4)
    started = time.monotonic()
    waiting.close()
    assert time.monotonic() - started < 0.9
    assert fill(holder, chain(holder, 2)) == 2


def test_closing_leaves_nothing_but_the_arena(host: Host) -> None:
    cache = host.open()
    fill(cache, chain(cache, 3))
    assert held_in(host.directory)
    cache.close()
    assert not held_in(host.directory)
    assert len(host.arenas()) == 1


def test_a_reservation_that_outlives_its_cache_holds_no_lock(host: Host) -> None:
    cache = host.open()
    hashes = chain(cache, 3)
    fill(cache, hashes)
    pending = cache.prepare(chain(cache, 1, seed=1), 0)
    cache.close()
    assert pending is not None
    again = host.open()
    pending.payload[:] = 0xFF  # a late engine writes into memory that is not lost under it
    assert read(again, hashes) == 3


def held_in(directory: Path) -> list[str]:
    """What this process still has open or mapped of a directory."""
    links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in links + mapped if str(directory) in line]
