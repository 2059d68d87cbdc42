"""Fetches that want the same blocks, and stores that go away under them: in simulated time."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr import BlockHash
from tests.cachemgr.tiers.doubles import PeersDouble, StoreDouble, TierDouble, names
from tests.cachemgr.tiers.fetch_rig import CHAIN, Rig, lmdb, redis, settle
from tests.cachemgr.tiers.simulated_time import clock, simulate


def test_a_block_on_its_way_is_joined() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(ask_s=0.001, block_s=0.002))
        other = names(32, seed=7, common=16)
        tier.has |= set(other)
        first = asyncio.ensure_future(rig.fetch(block_s=None))
        await asyncio.sleep(0.01)
        await asyncio.gather(rig.fetch(block_s=None), rig.fetch(other, block_s=None), first)
        assert (rig.store.run(CHAIN), rig.store.run(other)) == (32, 32)
        await settle()
        assert set(rig.store.brought.values()) == {1}
        assert sum(map(len, tier.gets)) == 48
        assert rig.figure("redis", "joined_blocks") == 28 + 12
        assert rig.forgotten()

    simulate(work)


def test_who_shares_a_front_does_not_wait_for_the_rest_of_a_flight() -> None:
    async def work() -> None:
        rig = Rig(redis(block_s=1.0))
        first = asyncio.ensure_future(rig.fetch(block_s=None))
        await asyncio.sleep(0.5)
        assert await rig.fetch(CHAIN[:4], block_s=None) == pytest.approx(3.5)
        await first
        assert rig.store.run(CHAIN) == 32

    simulate(work)


def test_a_flight_goes_on_while_anybody_waits_and_ends_with_the_last() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(block_s=1.0))
        fetches = [asyncio.ensure_future(rig.fetch(block_s=None)) for _ in range(3)]
        await asyncio.sleep(2.5)
        for fetch in fetches[:2]:
            fetch.cancel()
        await asyncio.sleep(2.0)
        assert (tier.under_way, len(tier.gets)) == (1, 1)
        fetches[2].cancel()
        await asyncio.wait(fetches)
        await settle()
        assert tier.under_way == 0
        assert rig.store.run(CHAIN) == 4
        assert rig.store.reserved == set()
        assert rig.forgotten()

    simulate(work)


def test_a_flight_that_brought_everything_ends_by_itself_and_nobody_waits_for_that() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(block_s=0.001))
        tier.after_s = 1.0
        assert await rig.fetch() < 0.1
        await asyncio.sleep(2)
        assert tier.ended == 1
        assert rig.forgotten()

    simulate(work)


def test_a_waiter_with_more_time_goes_on_after_a_flight_ended() -> None:
    async def work() -> None:
        rig = Rig(redis(block_s=1.0))
        first = asyncio.ensure_future(rig.fetch(block_s=None, limit_s=4.5))
        await asyncio.sleep(0.5)
        await rig.fetch(block_s=None, limit_s=60.0)
        await first
        assert rig.store.run(CHAIN) == 32

    simulate(work)


def test_who_comes_as_a_flight_ends_short_does_not_wait_for_what_it_left() -> None:
    """Between the end of a task and what is called after it, others run: they would look again and again."""

    class Watched(StoreDouble):
        looks = 0

        def missing(self, hashes: Sequence[BlockHash]) -> list[int]:
            self.looks += 1
            assert self.looks < 1000, "the loop is held up"
            return super().missing(hashes)

    class Short(TierDouble):
        other: asyncio.Task[float] | None = None

        async def get(self, *arguments: Any, **options: Any) -> None:
            await super().get(*arguments, **options)
            self.other = self.other or asyncio.create_task(rig.fetch())

    tier = Short("redis", CHAIN)
    tier.lacks = {CHAIN[5]}
    rig = Rig(tier, store=Watched())

    async def work() -> None:
        await rig.fetch()
        assert tier.other is not None
        await tier.other
        assert rig.store.run(CHAIN) == 5
        assert rig.forgotten()

    simulate(work)


@settings(max_examples=100)
@given(st.data())
def test_single_flight_whatever_comes_and_goes(data: st.DataObject) -> None:
    async def work() -> None:
        first, second = redis(ask_s=0.002, block_s=0.003), lmdb(ask_s=0.001, block_s=0.004)
        chains = [CHAIN[:20], CHAIN, names(28, seed=3, common=10), names(24, seed=4, common=18)]
        first.has = set(CHAIN[:24]) | set(chains[2])
        second.has = set(CHAIN) | set(chains[3])
        rig = Rig(first, second, peers=PeersDouble(CHAIN[:3], ask_s=0.001, block_s=0.001))

        async def one() -> None:
            await asyncio.sleep(data.draw(st.floats(0, 0.08), label="begins"))
            chain = data.draw(st.sampled_from(chains), label="chain")
            block_s = data.draw(st.sampled_from([None, 0.02, 0.005]), label="block_s")
            limit_s = data.draw(st.sampled_from([0.01, 0.1, 10.0]), label="limit")
            began = clock()
            leaves = data.draw(st.one_of(st.none(), st.floats(0, 0.1)), label="leaves")
            fetch = asyncio.ensure_future(rig.fetch(chain, block_s=block_s, limit_s=limit_s))
            await asyncio.wait([fetch], timeout=leaves)
            fetch.cancel()
            await asyncio.wait([fetch])
            assert clock() - began <= limit_s + 1e-6

        await asyncio.gather(*(one() for _ in range(data.draw(st.integers(1, 8), label="requests"))))
        await settle()
        assert set(rig.store.brought.values()) <= {1}
        assert rig.store.reserved == set()
        assert (first.under_way, second.under_way) == (0, 0)
        assert rig.forgotten()

    simulate(work)


def test_forget_ends_what_is_on_its_way_into_one_store_only() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(ask_s=1.0, block_s=1.0), peers=PeersDouble())
        other = StoreDouble()
        fetches = [
            asyncio.ensure_future(rig.fetching.fetch(store, CHAIN, deadline=clock() + 90, block_s=None))
            for store in (rig.store, rig.store, other)
        ]
        await asyncio.sleep(4.5)
        await rig.fetching.forget(rig.store)
        before = set(rig.store.here)
        await asyncio.wait(fetches)
        assert rig.store.here == before
        assert rig.store.reserved == set()
        assert other.run(CHAIN) == 32
        assert tier.under_way == 0

    simulate(work)


@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.5, 3.5])
def test_close_ends_everything_at_any_moment(at_s: float) -> None:
    async def work() -> None:
        rig = Rig(tier := redis(ask_s=1.0, block_s=1.0), peers=PeersDouble(ask_s=1.0))
        fetch = asyncio.ensure_future(rig.fetch(block_s=None))
        await asyncio.sleep(at_s)
        await rig.fetching.close()
        await fetch
        await rig.fetching.close()
        assert await rig.fetch() == 0.0
        await settle()
        assert tier.under_way == 0
        assert rig.forgotten()

    simulate(work)
