"""Arenas of other processes: read in place, never trusted, never written."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cachemgr.cache
from cachemgr import HostCache
from cachemgr.shard import HEADER_DTYPE, HEADER_NBYTES, slot_nbytes
from tests.cachemgr.host import FORMAT, Host, chain, fill, read, write
from tests.cachemgr.test_processes import held_in

STRIDE = slot_nbytes(FORMAT.payload_nbytes)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas are looked at only when the test says so."""
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 3600.0)


def refresh(cache: HostCache) -> None:
    """What the thread does, after a look-up."""
    cache.lookup([])
    cache._refresh_arenas()


def pair(host: Host, *, blocks: int = 32) -> tuple[HostCache, HostCache]:
    """Two caches of `blocks` slots each on one node."""
    first, second = (host.open(blocks=2 * blocks, arena_bytes=blocks * STRIDE) for _ in range(2))
    return first, second


def slots_of(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint8, "r+").reshape(-1, STRIDE)


def test_a_run_alternates_between_own_and_foreign_blocks(host: Host, frozen: None) -> None:
    first, second = pair(host)
    hashes = chain(first, 9)
    for index in range(9):
        assert write(second if index % 3 == 1 else first, hashes, index)
    refresh(second)
    assert second.lookup(hashes) == 9
    assert read(second, hashes) == 9
    assert second.counters()["cache_foreign_hit_blocks_total"] == 6
    assert second.counters()["cache_pins"] == 0
    second.check_integrity()


def test_long_runs_alternate_too(host: Host, frozen: None) -> None:
    first, second = pair(host, blocks=400)
    hashes = chain(first, 400)
    for index in range(400):
        assert write(second if index % 7 in (2, 3) else first, hashes, index)
    refresh(second)
    assert read(second, hashes) == 400


OPERATION = st.tuples(
    st.sampled_from(["write", "read", "refresh", "wait"]),
    st.integers(0, 1),
    st.integers(0, 3),
    st.integers(1, 6),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATION, max_size=60))
def test_two_small_caches_never_yield_wrong_bytes(
    host: Host, frozen: None, operations: list[tuple[str, int, int, int]]
) -> None:
    """Two times five slots for four chains of six blocks, in every order of writing, reading and scanning."""
    caches = pair(host, blocks=5)
    for verb, who, seed, count in operations:
        cache = caches[who]
        hashes = chain(cache, count, seed=seed)
        if verb == "write":
            fill(cache, hashes)
        elif verb == "read":
            known = cache.lookup(hashes)
            assert read(cache, hashes) <= known
        elif verb == "refresh":
            refresh(cache)
        else:
            host.clock.now += 1000 * count
        cache.check_integrity()
    for cache in caches:
        assert cache.counters()["cache_corrupt_blocks_total"] == cache.counters()["cache_pins"] == 0
        cache.close()


def test_restoring_foreign_blocks_from_the_middle(host: Host) -> None:
    first, second = pair(host)
    hashes = chain(first, 5)
    fill(first, hashes)
    refresh(second)
    lease = second.acquire(hashes, deadline=None)
    seen: list[int] = []
    assert second.restore(lease, first=3, sink=lambda blocks, _: seen.extend(blocks)) == 5
    assert seen == [3, 4]


def test_a_block_rewritten_after_the_lease_is_a_stale_miss(host: Host, frozen: None) -> None:
    first, second = pair(host, blocks=4)
    hashes = chain(first, 4)
    fill(first, hashes)
    refresh(second)
    leaf_gone = lambda: fill(first, chain(first, 2, seed=1))  # noqa: E731
    assert read(second, hashes, while_leased=leaf_gone) == 2, "the prefix that arrived is used"
    counts = second.counters()
    assert counts["cache_stale_blocks_total"] == 2, "both that were rewritten"
    assert counts["cache_corrupt_blocks_total"] == counts["cache_unreadable_blocks_total"] == 0
    assert second.lookup(hashes) == 2
    assert read(first, chain(first, 2, seed=1)) == 2, "the writer's block was left alone"


@pytest.mark.parametrize("offset", [0, 4, 8, 12, 16, 24, 28, 32, 48, 64, 80, 88, 96, 112, 128, 200, 383])
def test_a_flipped_byte_in_a_foreign_slot_is_a_miss_and_left_alone(
    host: Host, frozen: None, offset: int
) -> None:
    first, second = pair(host)
    hashes = chain(first, 4)
    fill(first, hashes)
    refresh(second)
    slots = slots_of(host.arenas()[0])
    headers = slots[:, :HEADER_NBYTES].copy().view(HEADER_DTYPE)[:, 0]
    row = next(row for row, header in enumerate(headers) if bytes(header["hash"]) == hashes[2])
    slots[row, offset] ^= 0x40
    before = slots.copy()
    assert read(second, hashes) == 2
    assert second.counters()["cache_stale_blocks_total"] == 1
    assert (slots == before).all()
    assert write(second, hashes, 2), "it can be written here"
    assert read(second, hashes) == 4


def test_one_request_forgets_every_bad_foreign_block_even_without_a_free_slot(
    host: Host, frozen: None
) -> None:
    """A full arena takes no copy of what another process is said to hold: it must be said no more."""
    first, second = pair(host, blocks=9)
    hashes = chain(first, 9)
    fill(first, hashes)
    fill(second, chain(second, 9, seed=1))
    refresh(second)
    slots_of(host.arenas()[0])[:, HEADER_NBYTES:] = 0  # payloads alone: no scan can see it
    refresh(second)
    assert second.lookup(hashes) == 9
    assert read(second, hashes) == 0
    assert second.counters()["cache_stale_blocks_total"] == 9
    assert second.counters()["cache_foreign_blocks"] == 0
    assert fill(second, hashes) == 9
    refresh(second)
    assert read(second, hashes) == 9
    second.check_integrity()


def test_evicted_and_reused_slots_are_forgotten_by_the_next_scan(host: Host, frozen: None) -> None:
    first, second = pair(host, blocks=6)
    old, new = chain(first, 6), chain(first, 4, seed=1)
    fill(first, old)
    refresh(second)
    assert second.lookup(old) == 6
    fill(first, new)
    assert second.lookup(new) == 0
    refresh(second)
    assert second.lookup(new) == 4
    assert second.lookup(old) == 2
    assert second.counters()["cache_foreign_blocks"] == 6
    assert read(second, new) == 4
    assert second.counters()["cache_stale_blocks_total"] == 0


def test_headers_are_scanned_only_when_somebody_asked(host: Host, frozen: None) -> None:
    first, second = pair(host)
    refresh(second)
    fill(first, chain(first, 3))
    second._refresh_arenas()
    assert second.counters()["cache_foreign_blocks"] == 0
    second.acquire([], deadline=None).release()
    second._refresh_arenas()
    assert second.counters()["cache_foreign_blocks"] == 3


def test_a_free_slot_takes_a_copy_but_nothing_is_evicted_for_one(host: Host, frozen: None) -> None:
    first, second = pair(host, blocks=4)
    shared, own = chain(first, 3), chain(first, 3, seed=1)
    fill(first, shared)
    fill(second, own)
    refresh(second)
    assert fill(second, shared) == 1, "one slot was free"
    assert second.counters()["cache_evicted_blocks_total"] == 0
    assert second.counters()["cache_full_refusals_total"] == 0
    assert second.lookup(own) == 3
    assert read(second, shared) == 3


def test_a_foreign_prefix_can_be_continued_even_at_the_cost_of_others(host: Host, frozen: None) -> None:
    first, second = pair(host, blocks=4)
    hashes = chain(first, 6)
    fill(first, hashes[:4])
    fill(second, chain(first, 4, seed=1))
    refresh(second)
    assert fill(second, hashes) == 2
    assert second.counters()["cache_evicted_blocks_total"] == 2
    assert read(second, hashes) == 6
    second.check_integrity()


def test_unused_foreign_blocks_expire_and_used_ones_do_not(host: Host, frozen: None) -> None:
    first, second = (host.open(blocks=64, arena_bytes=32 * STRIDE, ttl_s=10.0) for _ in range(2))
    idle, busy = chain(first, 3), chain(first, 3, seed=1)
    for hashes in (idle, busy):
        fill(first, hashes)
    refresh(second)
    for _ in range(2):
        host.clock.now += 6
        assert read(second, busy) == 3
    assert second.lookup(idle) == 0
    assert second.acquire(idle, deadline=None).blocks == 0
    assert fill(second, idle) == 3


def test_a_deleted_arena_is_let_go(host: Host, frozen: None) -> None:
    first, second = pair(host)
    hashes = chain(first, 3)
    fill(first, hashes)
    refresh(second)
    path = host.arenas()[0]

    def delete() -> None:
        path.unlink()
        second._refresh_arenas()

    assert read(second, hashes, while_leased=delete) == 0
    assert second.counters()["cache_stale_blocks_total"] == 3
    assert second.counters()["cache_foreign_arenas"] == 0
    assert second.lookup(hashes) == 0
    first.close()
    assert not [line for line in held_in(host.directory) if "_0.arena" in line], "its memory is free"


def test_a_free_arena_that_does_not_fit_is_read_whole(host: Host, frozen: None) -> None:
    first, second = pair(host, blocks=20)
    chains = [chain(first, 18), chain(first, 18, seed=1)]
    for cache, hashes in zip((first, second), chains, strict=True):
        fill(cache, hashes)
    second.close()
    first.close()
    third = host.open(blocks=40, arena_bytes=30 * STRIDE)
    assert [read(third, hashes) for hashes in chains] == [18, 18]
    assert third.counters()["cache_slots"] == 20
    assert third.counters()["cache_foreign_hit_blocks_total"] == 18
    third._refresh_arenas()
    assert [path.stat().st_size for path in host.arenas()] == [20 * STRIDE] * 2


def test_a_block_in_two_foreign_arenas_is_one_entry(host: Host, frozen: None) -> None:
    holders = [host.open(blocks=24, arena_bytes=8 * STRIDE) for _ in range(2)]
    hashes = chain(holders[0], 3)
    for cache in holders:
        assert fill(cache, hashes) == 3
    reader = host.open(blocks=24, arena_bytes=8 * STRIDE)
    assert read(reader, hashes) == 3
    assert reader.counters()["cache_foreign_blocks"] == 3
    assert len(reader._tier.table._state.others._used) == 3, "nothing is kept of the copy that is not used"
    host.arenas()[0].unlink()
    reader._refresh_arenas()
    assert read(reader, hashes) == 3
    host.arenas()[0].unlink()
    reader._refresh_arenas()
    assert reader.lookup(hashes) == 0
    assert not reader._tier.table._state.others._used


def test_an_arena_taken_over_under_a_lease_costs_that_lease_its_rest(host: Host, frozen: None) -> None:
    holder = host.open(blocks=8)
    hashes = chain(holder, 4)
    fill(holder, hashes)
    waiting = host.open(blocks=8)

    def take_over() -> None:
        holder.close()
        waiting._refresh_arenas()

    assert read(waiting, hashes, while_leased=take_over) == 0
    assert read(waiting, hashes) == 4
    waiting.check_integrity()


def test_an_arena_cut_by_a_stranger_costs_hits_and_nothing_else(host: Host, frozen: None) -> None:
    first, second = pair(host)
    hashes = chain(first, 6)
    fill(first, hashes)
    refresh(second)
    os.truncate(host.arenas()[0], STRIDE)
    assert read(second, hashes) == 0
    refresh(second)
    assert second.counters()["cache_stale_blocks_total"] == 6
    assert second.counters()["cache_foreign_arenas"] == 1
    assert second.lookup(hashes) == second.counters()["cache_foreign_blocks"] == 1, "what is left is read"
    assert read(second, hashes) == 1


def test_an_arena_that_others_read_is_not_cut_under_them(host: Host, frozen: None) -> None:
    """Touching a page that a mapped file lost kills the process: the arena is replaced instead."""
    first = host.open(blocks=64, arena_bytes=32 * STRIDE)
    hashes = chain(first, 5)
    fill(first, hashes)
    reader = host.open(blocks=64, arena_bytes=16 * STRIDE)
    inode = host.arenas()[0].stat().st_ino
    first.close()
    smaller = host.open(blocks=64, arena_bytes=8 * STRIDE)
    assert smaller.counters()["cache_slots"] == 8
    assert read(reader, hashes) == 5, "what is mapped stays whole"
    assert inode not in [path.stat().st_ino for path in host.arenas()]


@pytest.mark.parametrize("tamper", ["chmod", "link"])
def test_what_cannot_be_an_arena_is_not_read(host: Host, frozen: None, tamper: str) -> None:
    first = host.open(blocks=64, arena_bytes=32 * STRIDE)
    fill(first, chain(first, 3))
    (path,) = host.arenas()
    if tamper == "chmod":
        path.chmod(0o644)
    else:
        os.link(path, path.with_name("second-name"))
    second = host.open(blocks=64, arena_bytes=32 * STRIDE)
    assert second.counters()["cache_foreign_arenas"] == 0
    assert second.lookup(chain(first, 3)) == 0


def test_other_nodes_and_clusters_are_not_read(host: Host, frozen: None) -> None:
    first = host.open()
    fill(first, chain(first, 3))
    for others in ({"node": "node-2"}, {"cluster": "other"}):
        assert host.open(**others).counters()["cache_foreign_arenas"] == 0


def test_closing_unmaps_everything(host: Host, frozen: None) -> None:
    first, second = pair(host)
    fill(first, chain(first, 3))
    refresh(second)
    assert read(second, chain(first, 3)) == 3
    first.close()
    assert held_in(host.directory)
    second.close()
    assert not held_in(host.directory)
