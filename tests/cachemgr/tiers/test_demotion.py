"""What is offered to which tier, how often, and that a long chain holds nobody up."""

import asyncio

import pytest

from cachemgr.shard import address_of
from cachemgr.tiers.demotion import Demotion
from tests.cachemgr.tiers.doubles import StoreDouble, TierDouble, names
from tests.cachemgr.tiers.simulated_time import simulate

CHAIN = names(20)


async def settle(demotion: Demotion) -> int:
    """How many turns of the loop it took."""
    turns = 0
    while not demotion.idle:
        await asyncio.sleep(0)
        turns += 1
    return turns


def tiers() -> tuple[TierDouble, TierDouble]:
    return TierDouble("redis", admit_seen=2), TierDouble("lmdb", admit_seen=1)


def store_that_saw(times: int) -> StoreDouble:
    store = StoreDouble(CHAIN)
    store.seen.update(dict.fromkeys(CHAIN, times))
    return store


def test_what_is_committed_goes_to_the_tiers_that_admit_it() -> None:
    async def work() -> None:
        redis, lmdb = tiers()
        demotion, store = Demotion([redis, lmdb]), store_that_saw(1)
        for at in range(20):
            demotion.offer(store, CHAIN, at)
        await settle(demotion)
        assert (redis.put_names, lmdb.put_names) == ([], CHAIN)
        store.seen.update(CHAIN[:5])
        demotion.used(store, CHAIN[:8])
        await settle(demotion)
        assert redis.put_names == CHAIN[:5]
        assert demotion.counters()["lmdb"]["tier_offered_blocks_total"] == 28

    simulate(work)


def test_what_nobody_ever_saw_is_offered_to_nobody() -> None:
    async def work() -> None:
        redis, lmdb = tiers()
        demotion = Demotion([redis, lmdb])
        demotion.used(StoreDouble(), CHAIN)
        await settle(demotion)
        assert (redis.puts, lmdb.puts) == ([], [])

    simulate(work)


def test_blocks_are_offered_at_their_place_in_the_chain() -> None:
    async def work() -> None:
        redis, lmdb = tiers()
        demotion, store = Demotion([redis, lmdb]), store_that_saw(1)
        demotion.offer(store, CHAIN, 18)
        demotion.offer(store, CHAIN, 19)
        demotion.offer(store, CHAIN, 3)
        await settle(demotion)
        assert [index for put in lmdb.puts for index in put] == [18, 19, 3]

    simulate(work)


def test_what_came_from_a_tier_goes_to_those_before_it_only() -> None:
    async def work() -> None:
        redis, lmdb = tiers()
        demotion, store = Demotion([redis, lmdb]), store_that_saw(2)
        blocks = [address_of(CHAIN, at) for at in range(5)]
        demotion.came(store, blocks, lmdb)
        demotion.came(store, blocks, redis)
        await settle(demotion)
        assert (redis.put_names, lmdb.put_names) == (CHAIN[:5], [])

    simulate(work)


def test_a_long_chain_takes_many_turns() -> None:
    async def work() -> None:
        lmdb = TierDouble("lmdb")
        chain = names(1000)
        store = StoreDouble(chain)
        store.seen.update(chain)
        demotion = Demotion([lmdb])
        demotion.used(store, chain)
        assert lmdb.puts == []
        assert await settle(demotion) >= 10
        assert lmdb.put_names == chain
        assert store.longest_uses <= 100

    simulate(work)


def test_a_chain_that_waits_is_not_queued_again() -> None:
    async def work() -> None:
        lmdb = TierDouble("lmdb")
        demotion, store = Demotion([lmdb]), store_that_saw(1)
        for _ in range(100):
            demotion.used(store, CHAIN)
        await settle(demotion)
        assert lmdb.put_names == CHAIN
        demotion.used(store, CHAIN)
        await settle(demotion)
        assert len(lmdb.put_names) == 40

    simulate(work)


def test_what_waits_is_bounded_and_drops_are_counted() -> None:
    async def work() -> None:
        lmdb = TierDouble("lmdb")
        demotion, chain = Demotion([lmdb]), names(1000)
        stores = [StoreDouble(chain) for _ in range(100)]
        for store in stores:
            store.seen.update(chain)
            demotion.used(store, chain)
        waiting = demotion.counters()["lmdb"]["tier_offers_waiting"]
        assert waiting <= 65_536
        assert demotion.counters()["lmdb"]["tier_offers_dropped_total"] == 100_000 - waiting
        await settle(demotion)
        assert len(lmdb.put_names) == waiting
        assert demotion.counters()["lmdb"]["tier_offers_waiting"] == 0

    simulate(work)


def test_a_store_that_goes_away_is_offered_at_once_and_no_more() -> None:
    async def work() -> None:
        lmdb = TierDouble("lmdb")
        demotion, gone, other = Demotion([lmdb]), store_that_saw(1), store_that_saw(1)
        demotion.used(gone, CHAIN[:10])
        demotion.used(other, CHAIN[10:])
        demotion.forget(gone)
        assert lmdb.put_names == CHAIN[:10]
        await settle(demotion)
        assert lmdb.put_names == CHAIN
        demotion.used(other, CHAIN)
        demotion.close()
        demotion.close()
        demotion.used(other, CHAIN)
        await asyncio.sleep(0)
        assert lmdb.put_names == CHAIN

    simulate(work)


def test_a_tier_that_raises_is_counted_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        redis, lmdb = tiers()
        demotion, store = Demotion([redis, lmdb]), store_that_saw(2)
        redis.raises = True
        demotion.used(store, CHAIN)
        await settle(demotion)
        redis.raises = False
        demotion.used(store, CHAIN)
        await settle(demotion)
        assert redis.put_names == CHAIN
        assert demotion.counters()["redis"]["tier_offers_failed_total"] == 20

    simulate(work)
    assert "our own bug" in caplog.text
