"""What stays and what goes in every tier behind PrefixCache: leases, eviction, time to live."""

from tests.cachemgr.host import Host, chain, fill, read, write
from tests.cachemgr.open_tiers import OpenTier


def test_a_lease_keeps_its_blocks_whatever_else_is_written(open_tier: OpenTier) -> None:
    cache = open_tier(blocks=8)
    kept = chain(cache, 5)
    fill(cache, kept)

    def crowd() -> None:
        for seed in range(1, 20):
            fill(cache, chain(cache, 8, seed=seed))

    assert read(cache, kept, while_leased=crowd) == 5
    assert cache.counters()["cache_evicted_blocks_total"] > 20


def test_when_everything_is_leased_nothing_is_written(open_tier: OpenTier) -> None:
    cache = open_tier(blocks=4)
    fill(cache, chain(cache, 4))
    lease = cache.acquire(chain(cache, 4), deadline=None)
    assert fill(cache, chain(cache, 4, seed=1)) == 0
    lease.release()
    assert fill(cache, chain(cache, 4, seed=1)) == 4


def test_a_chain_longer_than_the_cache_keeps_its_front(open_tier: OpenTier) -> None:
    cache = open_tier(blocks=8)
    hashes = chain(cache, 20)
    assert fill(cache, hashes) == 8
    assert read(cache, hashes) == 8


def test_eviction_takes_leaves_of_the_least_recently_used_chain(open_tier: OpenTier) -> None:
    cache = open_tier(blocks=9)
    chains = [chain(cache, 3, seed=seed) for seed in range(4)]
    for hashes in chains[:3]:
        fill(cache, hashes)
    assert read(cache, chains[0]) == 3
    assert write(cache, chains[3], 0)
    assert [cache.lookup(hashes) for hashes in chains] == [3, 2, 3, 1]
    assert write(cache, chains[3], 1)
    assert write(cache, chains[3], 2)
    assert [cache.lookup(hashes) for hashes in chains] == [3, 0, 3, 3]


def test_a_chain_that_was_read_still_goes_leaf_first(open_tier: OpenTier) -> None:
    cache = open_tier(blocks=6)
    first, second = chain(cache, 6), chain(cache, 6, seed=1)
    fill(cache, first)
    assert read(cache, first) == 6
    for written in range(1, 7):
        assert write(cache, second, written - 1)
        assert cache.lookup(first) == 6 - written


def test_a_chain_that_grows_makes_room_at_the_cost_of_others(open_tier: OpenTier) -> None:
    """Its own front is the least recently used, but it is in use: the other chain gives way."""
    cache = open_tier(blocks=8)
    growing, idle = chain(cache, 7), chain(cache, 6, seed=1)
    fill(cache, growing[:2])
    fill(cache, idle)
    assert fill(cache, growing) == 5
    assert read(cache, growing) == 7
    assert read(cache, idle) == 1


def test_an_expired_block_is_not_found_even_before_it_is_swept(open_tier: OpenTier, host: Host) -> None:
    cache = open_tier(ttl_s=10.0)
    hashes = chain(cache, 40)
    fill(cache, hashes)
    host.clock.now += 10
    assert cache.lookup(hashes) == 0
    assert cache.acquire(hashes, deadline=None).blocks == 0


def test_unused_blocks_expire_and_used_ones_do_not(open_tier: OpenTier, host: Host) -> None:
    cache = open_tier(ttl_s=10.0)
    idle, busy, leased = (chain(cache, 3, seed=seed) for seed in range(3))
    for hashes in (idle, busy, leased):
        fill(cache, hashes)
    lease = cache.acquire(leased, deadline=None)
    for _ in range(3):
        host.clock.now += 6
        assert read(cache, busy) == 3
    assert cache.lookup(idle) == 0
    assert cache.lookup(leased) == 3
    assert fill(cache, idle) == 3
    assert read(cache, idle) == 3
    lease.release()


def test_a_growing_chain_keeps_its_front_alive(open_tier: OpenTier, host: Host) -> None:
    cache = open_tier(ttl_s=10.0)
    hashes = chain(cache, 30)
    for index in range(30):
        assert write(cache, hashes, index)
        host.clock.now += 1
    assert read(cache, hashes) == 30
