"""A lease that waits for blocks from elsewhere: it ends once, pins what came, and never hangs."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cachemgr import BlockHash, Lease, NoRemoteTiers, PrefixCache, open_cache
from cachemgr.host_contract import HostStore
from cachemgr.shard import address_of
from tests.cachemgr.copier import Copier
from tests.cachemgr.host import FORMAT, SECRETS, Host, chain, fill, payload_of, read, write
from tests.cachemgr.node import Node, open_node
from tests.cachemgr.open_tiers import open_travelled_tier


class Beyond:
    """RemoteTiers that do what the test says, when it says so."""

    active = True

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[BlockHash], float]] = []
        self.prices: list[float | None] = []
        self.done: list[Callable[[], None]] = []
        self.given_up = 0
        self.offered: list[tuple[BlockHash, bool]] = []
        self.used_again: list[list[BlockHash]] = []
        self.at_once = False
        self.closed: list[bool] = []
        self.cache: PrefixCache | None = None

    def fetch(
        self,
        hashes: Sequence[BlockHash],
        *,
        deadline: float,
        done: Callable[[], None],
        block_s: float | None = None,
    ) -> Callable[[], None]:
        self.asked.append((hashes, deadline))
        self.prices.append(block_s)
        self.done.append(done)
        if self.at_once:
            done()
        return self._give_up

    def offer(self, hashes: Sequence[BlockHash], index: int) -> None:
        assert self.cache is not None
        self.offered.append((hashes[index], self.cache.lookup([hashes[index]]) == 1))

    def used(self, hashes: Sequence[BlockHash]) -> None:
        self.used_again.append(list(hashes))

    def close(self) -> None:
        assert self.cache is not None
        self.closed.append(self.cache.counters()["cache_slots"] > 0)

    def _give_up(self) -> None:
        self.given_up += 1


class Rig:
    """A node of 16 blocks, another that has everything, and what stands between them."""

    def __init__(self, host: Host) -> None:
        self.clock = host.clock
        self.beyond = Beyond()
        self.far = open_node(host, "far", blocks=64)
        stores: list[HostStore] = []

        def connect(store: HostStore) -> Beyond:
            stores.append(store)
            return self.beyond

        self.cache = self.beyond.cache = host.open(node="near", blocks=16, remote=connect)
        self.near = Node(self.cache, stores[0])
        self.hashes = chain(self.cache, 8)
        fill(self.far.cache, self.hashes)
        for index in range(3):
            write(self.cache, self.hashes, index)

    def acquire(self, *, seconds: float = 5.0) -> Lease:
        return self.cache.acquire(self.hashes, deadline=self.clock() + seconds)

    def bring(self, blocks: slice) -> None:
        assert self.far.give(self.near, self.hashes[blocks]) == len(self.hashes[blocks])

    def restored(self, lease: Lease) -> int:
        got: list[int] = []

        def sink(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
            for block, payload in zip(blocks, payloads, strict=True):
                assert payload.tobytes() == payload_of(self.hashes[block]).tobytes()
                got.append(block)

        assert self.cache.restore(lease, first=0, sink=sink) == len(got)
        return len(got)

    def counts(self, *names: str) -> list[float]:
        counts = self.cache.counters()
        return [counts[f"cache_{name}"] for name in names]


@pytest.fixture
def rig(host: Host) -> Rig:
    return Rig(host)


def test_a_lease_grows_by_what_was_fetched_and_is_ready_then(rig: Rig) -> None:
    lease = rig.acquire()
    assert rig.beyond.asked == [(tuple(rig.hashes), rig.clock() + 5.0)]
    assert (lease.ready, lease.blocks) == (False, 3)
    rig.bring(slice(3, 7))
    assert (lease.ready, lease.blocks) == (False, 3)
    rig.clock.now += 2
    rig.beyond.done[0]()
    assert (lease.ready, lease.blocks) == (True, 7)
    assert rig.counts("pins") == [7]
    assert rig.restored(lease) == 7
    lease.release()
    assert rig.counts("pins", "fetches_total", "fetched_blocks_total", "fetch_seconds_total") == [0, 1, 4, 2]
    assert rig.counts("fetch_timeouts_total", "hit_blocks_total", "acquires_total") == [0, 3, 1]
    assert not rig.beyond.given_up, "it got what it wanted"


def test_what_was_fetched_stays_while_it_is_leased(rig: Rig) -> None:
    lease = rig.acquire()
    rig.bring(slice(3, 8))
    rig.beyond.done[0]()
    for seed in range(1, 6):
        fill(rig.cache, chain(rig.cache, 16, seed=seed))
    assert rig.restored(lease) == 8
    lease.release()


def test_a_fetch_that_brings_nothing_or_less_leaves_what_is_here(rig: Rig) -> None:
    lease = rig.acquire()
    rig.bring(slice(5, 8))
    rig.beyond.done[0]()
    assert (lease.ready, lease.blocks) == (True, 3)
    assert rig.restored(lease) == 3
    lease.release()


def test_a_fetch_that_is_never_done_ends_at_its_deadline_with_what_came(rig: Rig) -> None:
    lease = rig.acquire(seconds=5.0)
    rig.bring(slice(3, 5))
    rig.clock.now += 4.9
    assert not lease.ready
    rig.clock.now += 0.1
    assert (lease.ready, lease.blocks) == (True, 5)
    assert rig.beyond.given_up == 1
    rig.bring(slice(5, 8))
    rig.beyond.done[0]()
    assert lease.blocks == 5, "it may be read already"
    assert rig.restored(lease) == 5
    lease.release()
    assert rig.counts("pins", "fetches_total", "fetched_blocks_total", "fetch_timeouts_total") == [0, 1, 2, 1]


@pytest.mark.parametrize("late", [True, False])
def test_releasing_while_blocks_come_gives_up_and_pins_nothing(rig: Rig, late: bool) -> None:
    lease = rig.acquire()
    rig.bring(slice(3, 5))
    lease.release()
    lease.release()
    assert rig.beyond.given_up == 1
    if late:
        rig.clock.now += 60
    rig.beyond.done[0]()
    rig.beyond.done[0]()
    assert lease.ready
    assert rig.counts("pins") == [0]
    with pytest.raises(RuntimeError, match="released"):
        rig.restored(lease)
    rig.cache.check_integrity()


def test_releasing_after_it_came_unpins_all_of_it_once(rig: Rig) -> None:
    lease, other = rig.acquire(), rig.acquire()
    rig.bring(slice(3, 8))
    for done in rig.beyond.done:
        done()
        done()
    assert rig.counts("pins") == [16]
    lease.release()
    lease.release()
    assert rig.counts("pins") == [8]
    assert rig.restored(other) == 8
    other.release()
    assert rig.counts("pins") == [0]


def test_restoring_what_is_not_ready_is_our_bug(rig: Rig) -> None:
    lease = rig.acquire()
    with pytest.raises(RuntimeError, match="ready"):
        rig.restored(lease)
    lease.release()


def test_done_may_come_before_fetch_returns(rig: Rig) -> None:
    rig.beyond.at_once = True
    lease = rig.acquire()
    assert (lease.ready, lease.blocks) == (True, 3)
    lease.release()
    assert rig.counts("pins") == [0]
    assert not rig.beyond.given_up


def test_nothing_is_fetched_without_need_time_or_anybody_beyond(rig: Rig) -> None:
    leases = [rig.cache.acquire(rig.hashes[:3], deadline=rig.clock() + 5)]
    leases.append(rig.cache.acquire(rig.hashes, deadline=None))
    leases.append(rig.cache.acquire(rig.hashes, deadline=rig.clock()))
    leases.append(rig.cache.acquire([], deadline=rig.clock() + 5))
    rig.beyond.active = False
    leases.append(rig.acquire())
    assert [lease.blocks for lease in leases] == [3, 3, 3, 0, 3]
    assert all(lease.ready for lease in leases)
    assert not rig.beyond.asked
    for lease in leases:
        lease.release()


def test_a_fetch_that_raises_pins_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(hashes: object, **how: object) -> Callable[[], None]:
        raise OSError("loop is gone")

    monkeypatch.setattr(rig.beyond, "fetch", broken)
    with pytest.raises(OSError, match="loop is gone"):
        rig.acquire()
    assert rig.counts("pins") == [0]


def test_what_is_found_is_told_and_what_is_missing_is_asked_with_the_price_of_a_block(rig: Rig) -> None:
    lease = rig.cache.acquire(rig.hashes, deadline=rig.clock() + 5.0, block_s=0.02)
    found = rig.beyond.used_again[-1]
    assert found == list(rig.hashes[: len(found)])
    assert len(found) == lease.blocks > 0
    assert rig.beyond.prices == [0.02]
    lease.release()


def test_every_committed_block_is_offered_once_it_can_be_found(rig: Rig) -> None:
    assert rig.beyond.offered == [(name, True) for name in rig.hashes[:3]]
    rig.bring(slice(3, 5))
    pending = rig.cache.prepare(rig.hashes, 5)
    assert pending is not None
    rig.cache.abort(pending)
    assert len(rig.beyond.offered) == 3, "neither what came from elsewhere nor what was given up"


def test_closing_closes_what_is_beyond_first_and_leases_end(rig: Rig) -> None:
    lease, left = rig.acquire(), rig.acquire()
    rig.cache.close()
    rig.cache.close()
    assert rig.beyond.closed == [True], "once, while the arenas were there"
    rig.beyond.done[0]()
    assert (lease.ready, lease.blocks) == (True, 3)
    assert rig.cache.restore(lease, first=0, sink=lambda *_: None) == 0
    lease.release()
    rig.clock.now += 5
    assert left.ready
    left.release()
    assert rig.acquire().ready
    assert len(rig.beyond.asked) == 2


def test_a_lease_of_a_tier_that_was_lost_meanwhile_is_a_miss(rig: Rig, host: Host) -> None:
    lease = rig.acquire()
    (path,) = (path for path in host.arenas() if "_near_" in path.name)
    path.unlink()
    rig.cache._refresh_arenas()
    rig.bring(slice(0, 8))
    rig.beyond.done[0]()
    assert lease.ready
    assert rig.cache.restore(lease, first=0, sink=lambda *_: None) == 0
    lease.release()
    assert read(rig.cache, rig.hashes) == 8
    rig.cache.check_integrity()


def test_done_deadline_and_release_at_once_from_threads_leave_nothing_pinned(rig: Rig) -> None:
    for turn in range(200):
        rig.near.store.drop(rig.hashes[3:])
        lease = rig.acquire(seconds=0.0 if turn % 3 == 0 else 5.0) if turn else rig.acquire()
        rig.bring(slice(3, 8))
        done = rig.beyond.done[-1]
        if turn % 2:
            rig.clock.now += 5
        start = threading.Barrier(4)

        def at_once(call: Callable[[], object], start: threading.Barrier = start) -> threading.Thread:
            thread = threading.Thread(target=lambda: (start.wait(), call()))
            thread.start()
            return thread

        calls = (done, lease.release, lambda lease=lease: lease.ready, lease.release)
        for thread in [at_once(call) for call in calls]:
            thread.join()
        assert lease.ready
        assert rig.counts("pins") == [0]
    rig.cache.check_integrity()


def test_a_release_that_falls_into_the_pinning_of_what_came_unpins_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = rig.acquire()
    rig.bring(slice(3, 8))
    table = rig.cache._tier.table
    pin_fetched = table.pin_fetched
    releasing = threading.Thread(target=lease.release)

    def pin_and_release(hashes: Sequence[BlockHash], **how: Any) -> list[int]:
        slots = pin_fetched(hashes, **how)
        releasing.start()
        releasing.join(0.2)
        return slots

    monkeypatch.setattr(table, "pin_fetched", pin_and_release)
    rig.beyond.done[0]()
    releasing.join(60)
    assert rig.counts("pins") == [0]
    rig.cache.check_integrity()


def test_a_cache_whose_tiers_cannot_be_made_is_not_left_open(host: Host) -> None:
    def broken(store: HostStore) -> NoRemoteTiers:
        raise OSError("no socket")

    with pytest.raises(OSError, match="no socket"):
        open_cache(FORMAT, host.settings(blocks=8), SECRETS, remote=broken)
    assert host.open(blocks=8).counters()["cache_slots"] == 8, "its arena is free again"


@pytest.mark.parametrize("beyond", [False, True])
def test_a_full_cache_declines_blocks_only_where_nobody_beyond_would_miss_them(
    host: Host, beyond: bool
) -> None:
    """What keeps coming back is worth more than what comes once; but others get a block only from here."""
    others = Beyond()
    cache = host.open(blocks=120, remote=(lambda store: others) if beyond else None)
    others.cache = cache
    for turn in range(300):
        for hashes in (chain(cache, 20, seed=turn % 5), chain(cache, 20, seed=100 + turn)):
            cache.acquire(hashes, deadline=None).release()
            fill(cache, hashes)
    declined = cache.counters()["cache_declined_blocks_total"]
    assert (declined == 0) if beyond else (declined > 100)


def test_the_travelled_tier_fetches_every_block_it_restores(host: Host) -> None:
    cache = open_travelled_tier(host)(blocks=16)
    hashes = chain(cache, 12)
    fill(cache, hashes)
    assert read(cache, hashes) == read(cache, hashes) == 12
    counts = cache.counters()
    assert counts["cache_fetched_blocks_total"] == counts["cache_received_blocks_total"] == 24
    assert counts["cache_dropped_blocks_total"] == counts["cache_hit_blocks_total"] == 24


def test_a_real_copier_brings_a_prompt_from_another_node(host: Host) -> None:
    far = open_node(host, "far", blocks=64)
    copiers: list[Copier] = []

    def connect(store: HostStore) -> Copier:
        copiers.append(Copier(store, far.store))
        return copiers[0]

    cache = host.open(node="near", blocks=64, remote=connect)
    hashes = chain(far.cache, 40)
    fill(far.cache, hashes[:36])
    lease = cache.acquire(hashes, deadline=host.clock() + 60)
    copiers[0].settle()
    assert (lease.ready, lease.blocks) == (True, 36)
    lease.release()
    assert read(cache, hashes) == 36
    assert write(cache, hashes, 36)
    assert copiers[0].offered == [hashes[36]]
    assert cache.prepare(hashes, 36) is None
    assert address_of(hashes, 35) in [held.address for held in copiers[0]._near.hold(hashes[35:36]) if held]
