"""Namespaces that share one host tier: none evicts all others, and none holds more than its quota."""

from random import Random
from threading import Event, Thread

import numpy as np
import pytest

from cachemgr import HostCache, NamespaceShare
from cachemgr.contract import BlockHash
from cachemgr.counts import Counts
from cachemgr.eviction.ledger import MOST_NAMED, Ledger
from cachemgr.shard import address_of
from cachemgr.slot_table import SlotTable
from tests.cachemgr.host import FORMAT, Host, chain, payload_of, read

SLOTS = 40
HOT = 10
GUARDED = {"a": NamespaceShare(), "b": NamespaceShare(min_share=HOT / SLOTS)}


def write(cache: HostCache, hashes: list[BlockHash], *, namespace: str) -> int:
    """Commit a chain for a namespace; how many blocks were written."""
    written = 0
    for index, name in enumerate(hashes):
        pending = cache.prepare(hashes, index, namespace=namespace)
        if pending is not None:
            pending.payload[:] = payload_of(name)
            cache.commit(pending)
            written += 1
    return written


def use(cache: HostCache, hashes: list[BlockHash], *, namespace: str) -> int:
    """Lease what is here of a chain; how many blocks."""
    lease = cache.acquire(hashes, deadline=None, namespace=namespace)
    lease.release()
    return lease.blocks


def flood(cache: HostCache, *, namespace: str, times: int = 10) -> None:
    """Fresh blocks, `times` the capacity; each prompt comes twice, so that they are worth something."""
    for seed in range(100, 100 + times * SLOTS // 8):
        hashes = chain(cache, 8, seed=seed, namespace=namespace)
        for _ in range(2):
            write(cache, hashes, namespace=namespace)
            use(cache, hashes, namespace=namespace)


@pytest.mark.parametrize("shared", [True, False])
def test_a_flood_spares_what_a_minimum_share_covers_and_only_that(host: Host, shared: bool) -> None:
    cache = host.open(blocks=SLOTS)
    cache.set_shares(GUARDED if shared else {})
    hot = chain(cache, HOT, namespace="b")
    assert write(cache, hot, namespace="b") == HOT
    flood(cache, namespace="a")
    assert (read(cache, hot) == HOT) == shared
    assert not shared or cache.usage() == {"a": SLOTS - HOT, "b": HOT, "": 0}
    cache.check_integrity()


def test_a_quota_is_kept_while_slots_are_free_and_counted(host: Host) -> None:
    cache = host.open(blocks=SLOTS)
    cache.set_shares({"a": NamespaceShare(quota=0.25)})
    first, second = chain(cache, 8, namespace="a"), chain(cache, 8, seed=1, namespace="a")
    write(cache, first, namespace="a")
    write(cache, second, namespace="a")
    assert cache.usage() == {"a": 10, "": 0}
    assert cache.lookup(second) == 8
    counts = cache.counters()
    assert counts["cache_quota_evictions_total"] == counts["cache_evicted_blocks_total"] == 6
    assert counts["cache_share_evictions_total"] == 0
    assert write(cache, chain(cache, 8, namespace="other"), namespace="other") == 8
    assert cache.usage() == {"a": 10, "": 8}


def test_who_comes_late_gets_its_minimum_share_from_who_holds_more(host: Host) -> None:
    cache = host.open(blocks=SLOTS)
    cache.set_shares(GUARDED)
    flood(cache, namespace="a", times=2)
    assert cache.usage()["a"] == SLOTS
    assert write(cache, chain(cache, HOT, namespace="b"), namespace="b") == HOT
    assert cache.usage()["b"] == HOT
    assert cache.counters()["cache_share_evictions_total"] == HOT
    cache.check_integrity()


def test_what_was_found_at_the_start_is_whose_prompt_uses_it_first(host: Host) -> None:
    before = host.open(blocks=SLOTS)
    hot = chain(before, HOT, namespace="b")
    write(before, hot, namespace="b")
    before.close()
    cache = host.open(blocks=SLOTS)
    cache.set_shares(GUARDED)
    assert cache.usage() == {"a": 0, "b": 0, "": HOT}
    assert use(cache, hot, namespace="b") == HOT
    assert cache.usage() == {"a": 0, "b": HOT, "": 0}
    flood(cache, namespace="a")
    assert read(cache, hot) == HOT
    cache.check_integrity()


def test_what_is_claimed_at_the_quota_costs_one_of_ones_own(host: Host) -> None:
    before = host.open(blocks=SLOTS)
    old = chain(before, 8, namespace="a")
    write(before, old, namespace="a")
    before.close()
    cache = host.open(blocks=SLOTS)
    cache.set_shares({"a": NamespaceShare(quota=0.25)})
    write(cache, chain(cache, 10, seed=1, namespace="a"), namespace="a")
    assert use(cache, old, namespace="a") == 8
    assert cache.usage() == {"a": 10, "": 0}
    assert cache.lookup(old) == 8
    assert cache.counters()["cache_quota_evictions_total"] == 8
    cache.check_integrity()


def test_a_block_that_another_namespace_holds_does_not_change_hands() -> None:
    table = _table(SLOTS)
    table.set_shares(GUARDED)
    hashes = _names(4)
    _make(table, hashes, namespace="b")
    table.unpin(table.pin(hashes, namespace="a"))
    assert table.usage() == {"a": 0, "b": 4, "": 0}


def test_public_blocks_count_to_nobody_and_what_follows_them_to_its_namespace() -> None:
    table = _table(SLOTS)
    table.set_shares(GUARDED)
    hashes = _names(6)
    table.set_public(frozenset(hashes[:2]))
    _make(table, hashes, namespace="b")
    assert table.usage() == {"a": 0, "b": 4, "": 2}
    table.unpin(table.pin(hashes, namespace="a"))
    assert table.usage() == {"a": 0, "b": 4, "": 2}
    table.check_integrity(range(SLOTS))


def test_a_public_prefix_of_the_cache_is_nobodys(host: Host) -> None:
    cache = host.open(blocks=SLOTS)
    cache.set_shares(GUARDED)
    tokens = np.arange(6 * FORMAT.block_tokens)
    cache.set_public([tokens[: 2 * FORMAT.block_tokens]])
    public = cache.public_blocks(tokens)
    ours = cache.hashes(tokens, namespace="b", public=public)
    write(cache, ours, namespace="b")
    theirs = cache.hashes(tokens, namespace="a", public=public)
    assert use(cache, theirs, namespace="a") == public == 2
    assert cache.usage() == {"a": 0, "b": 4, "": 2}
    cache.check_integrity()


def test_who_is_named_no_more_leaves_blocks_to_all_and_a_lower_quota_is_reached_by_and_by(host: Host) -> None:
    cache = host.open(blocks=SLOTS)
    cache.set_shares({"a": NamespaceShare(), "b": NamespaceShare()})
    ours, theirs = chain(cache, 20, namespace="a"), chain(cache, 20, seed=1, namespace="b")
    write(cache, ours, namespace="a")
    write(cache, theirs, namespace="b")
    cache.set_shares({"b": NamespaceShare(quota=0.25)})
    assert cache.usage() == {"b": 20, "": 20}
    cache.check_integrity()
    for _ in range(3):
        use(cache, ours, namespace="a")
    assert cache.usage()["b"] == 10
    assert cache.lookup(theirs) == 10, "the end of a chain goes before its front"
    cache.set_shares({})
    assert cache.usage() == {"": 30}
    assert read(cache, ours) == 20
    cache.check_integrity()


def test_while_nobody_who_is_named_comes_all_is_as_without_shares() -> None:
    plain, shared = _table(64), _table(64)
    shared.set_shares({"absent": NamespaceShare(quota=0.5)})
    random = Random(7)
    for _ in range(3000):
        number, length = min(int(random.expovariate(0.05)), 200), random.randint(1, 12)
        hashes = _names(length, number)
        found = [_make_after_use(table, hashes) for table in (plain, shared)]
        assert found[0] == found[1]
    assert plain._counts == shared._counts
    assert plain._counts.declined_blocks > 0
    assert plain._counts.evicted_blocks > 0


def test_shares_change_while_two_threads_use_the_cache(host: Host) -> None:
    cache = host.open(blocks=SLOTS)
    done, errors = Event(), []

    def read_on(namespace: str) -> None:
        chains = [chain(cache, 8, seed=seed, namespace=namespace) for seed in range(6)]
        try:
            while not done.is_set():
                for hashes in chains:
                    use(cache, hashes, namespace=namespace)
        except Exception as error:  # reported by the test: a thread's own would be lost
            errors.append(error)

    readers = [Thread(target=read_on, args=(namespace,)) for namespace in "ab"]
    for reader in readers:
        reader.start()
    try:
        turns = [GUARDED, {}, {"a": NamespaceShare(quota=0.2)}, {"b": NamespaceShare(quota=0.5)}]
        for turn in range(40):
            cache.set_shares(turns[turn % len(turns)])
            for namespace in "ab":
                write(cache, chain(cache, 8, seed=turn % 6, namespace=namespace), namespace=namespace)
            cache._tier.table.check_integrity(range(SLOTS))
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not errors
    cache.check_integrity()
    assert cache.counters()["cache_pins"] == 0


@pytest.mark.parametrize(
    ("shares", "what"),
    [
        ({"a": NamespaceShare(quota=1.5)}, "quota of 'a'"),
        ({"a": NamespaceShare(min_share=-0.1)}, "min_share of 'a'"),
        ({"a": NamespaceShare(min_share=0.6), "b": NamespaceShare(min_share=0.6)}, "1.200"),
        ({"": NamespaceShare()}, "must have a name"),
        ({str(number): NamespaceShare() for number in range(MOST_NAMED + 1)}, "at most 64"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_changes_nothing(
    shares: dict[str, NamespaceShare], what: str
) -> None:
    table = _table(SLOTS)
    table.set_shares(GUARDED)
    with pytest.raises(ValueError, match=what):
        table.set_shares(shares)
    assert set(table.usage()) == {"a", "b", ""}


def test_as_many_as_may_be_are_named_anew_as_often_as_one_likes() -> None:
    table = _table(SLOTS)
    for turn in range(4):
        table.set_shares({f"{turn} {number}": NamespaceShare() for number in range(MOST_NAMED)})
        assert len(table.usage()) == MOST_NAMED + 1
        _make(table, _names(6, turn), namespace=f"{turn} 0")
    table.check_integrity(range(SLOTS))


def test_who_holds_most_for_what_is_due_to_it_gives() -> None:
    ledger = Ledger()
    ledger.add_slots(100)
    ledger.name({1: NamespaceShare(min_share=0.2), 2: NamespaceShare(), 3: NamespaceShare(quota=0.1)})
    ledger.held[1:4] = [20, 50, 0]
    assert ledger.givers(1) == [2, 1, 0]  # 50 of 20, 20 of 20, 30 of 80
    assert ledger.givers(3) == [2, 0, 3], "nobody gives what a minimum share covers"
    ledger.held[3] = 10
    assert ledger.givers(3) == [3], "a quota"
    ledger.held[1:4] = [0, 20, 0]
    assert ledger.givers(2) == [2, 0], "of equals, who asks"


def _table(slots: int) -> SlotTable:
    table = SlotTable(slots, ttl_s=1e9, erase=lambda slot: None, clock=lambda: 1.0, counts=Counts())
    table.add_empty(range(slots))
    return table


def _names(count: int, number: int = 0) -> list[BlockHash]:
    of_all = np.random.default_rng(number).bytes(16 * count)
    return [BlockHash(of_all[16 * index : 16 * index + 16]) for index in range(count)]


def _make(table: SlotTable, hashes: list[BlockHash], *, namespace: str = "") -> None:
    for index in range(len(hashes)):
        slot = table.reserve(hashes, index, namespace=namespace)
        if slot is not None:
            table.publish(slot, address_of(hashes, index), hashes)


def _make_after_use(table: SlotTable, hashes: list[BlockHash]) -> list[int]:
    slots = table.pin(hashes)
    _make(table, hashes)
    table.unpin(slots)
    return slots
