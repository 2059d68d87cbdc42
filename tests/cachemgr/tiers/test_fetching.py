"""Which block comes from where: in simulated time, against tiers in memory."""

import asyncio

import pytest

from cachemgr.tiers.fetching import PEER
from tests.cachemgr.tiers.doubles import NBYTES, PeersDouble, StoreDouble
from tests.cachemgr.tiers.fetch_rig import CHAIN, Rig, lmdb, redis, settle
from tests.cachemgr.tiers.simulated_time import simulate


def test_what_is_missing_comes_and_nothing_else() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(), store=StoreDouble([CHAIN[0], CHAIN[5]]))
        await rig.fetch()
        await settle()
        assert rig.store.run(CHAIN) == 32
        assert tier.gets == [[at for at in range(32) if at not in (0, 5)]]
        assert rig.came == [("redis", tier.gets[0])]
        assert rig.figure("redis", "fetched_blocks") == 30
        assert rig.figure("redis", "fetched_bytes") == 30 * NBYTES
        assert rig.forgotten()

    simulate(work)


def test_a_prompt_that_is_here_asks_nobody() -> None:
    async def work() -> None:
        peers = PeersDouble()
        rig = Rig(tier := redis(), peers=peers, store=StoreDouble(CHAIN))
        await rig.fetch()
        assert (tier.asks, peers.asks) == ([], 0)

    simulate(work)


def test_peers_are_asked_first_and_a_tier_for_the_rest() -> None:
    async def work() -> None:
        peers = PeersDouble(CHAIN[:10], ask_s=0.001, block_s=0.0005)
        rig = Rig(tier := redis(), peers=peers)
        await rig.fetch()
        assert rig.store.run(CHAIN) == 32
        assert tier.gets == [list(range(10, 32))]
        assert rig.figure(PEER, "fetched_blocks") == 10

    simulate(work)


def test_the_cheaper_tier_is_taken_once_both_are_known() -> None:
    async def work() -> None:
        tiers = [redis(ask_s=0.002, first_s=0.004, block_s=0.002), lmdb(ask_s=0.001, block_s=0.001)]
        rig = Rig(*tiers)
        for _ in range(12):
            rig.store.here.clear()
            await rig.fetch()
            assert rig.store.run(CHAIN) == 32
        assert tiers[1].gets[-1] == list(range(32))
        assert len(tiers[1].gets) >= 8

    simulate(work)


def test_the_slower_tier_is_tried_now_and_then() -> None:
    async def work() -> None:
        first, second = redis(block_s=0.004), lmdb(block_s=0.002)
        rig = Rig(first, second)
        for _ in range(250):
            rig.store.here.clear()
            await rig.fetch()
            assert rig.store.run(CHAIN) == 32
            await asyncio.sleep(10)
        assert 3 <= len(first.gets) <= 8
        first.block_s = 0.0001
        for _ in range(800):
            rig.store.here.clear()
            await rig.fetch()
        assert len(first.gets) > 200

    simulate(work)


def test_of_equals_the_first_is_taken() -> None:
    async def work() -> None:
        rig = Rig(first := redis(), second := lmdb())
        await rig.fetch()
        assert (len(first.gets), len(second.gets)) == (1, 0)

    simulate(work)


def test_each_gives_what_the_other_lacks() -> None:
    async def work() -> None:
        first, second = redis(), lmdb()
        first.has -= set(CHAIN[8:20])
        second.has -= {CHAIN[3], CHAIN[25]}
        rig = Rig(first, second)
        await rig.fetch()
        assert rig.store.run(CHAIN) == 32
        assert all(count == 1 for count in rig.store.brought.values())

    simulate(work)


def test_nobody_is_asked_behind_a_block_that_nobody_has() -> None:
    async def work() -> None:
        first, second = redis(), lmdb()
        first.has -= {CHAIN[7]}
        second.has -= {CHAIN[7]}
        rig = Rig(first, second)
        await rig.fetch()
        assert rig.store.run(CHAIN) == 7
        assert len(rig.store.here) == 7
        assert len(first.asks) <= 2

    simulate(work)


def test_a_block_that_a_tier_said_it_has_and_does_not_comes_from_the_other() -> None:
    async def work() -> None:
        first, second = redis(), lmdb()
        first.lacks = {CHAIN[4]}
        rig = Rig(first, second)
        await rig.fetch()
        assert rig.store.run(CHAIN) == 32
        assert second.gets[0][0] == 4

    simulate(work)


def test_tiers_that_lie_are_not_asked_for_ever() -> None:
    async def work() -> None:
        first, second = redis(), lmdb()
        first.lacks = second.lacks = {CHAIN[4]}
        rig = Rig(first, second)
        await rig.fetch()
        assert rig.store.run(CHAIN) == 4
        assert len(first.gets) + len(second.gets) <= 4

    simulate(work)


def test_a_tier_that_is_not_usable_is_not_asked() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(), other := lmdb())
        tier.usable = False
        await rig.fetch()
        assert (tier.asks, len(other.gets)) == ([], 1)
        assert rig.store.run(CHAIN) == 32

    simulate(work)


def test_a_tier_that_raises_is_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        rig = Rig(tier := redis(), lmdb())
        tier.raises = True
        await rig.fetch()
        await settle()
        assert rig.store.run(CHAIN) == 32
        assert rig.forgotten()

    simulate(work)
    assert "our own bug" in caplog.text


def test_a_store_without_room_ends_it() -> None:
    async def work() -> None:
        rig = Rig(redis(), lmdb(), store=StoreDouble(full=True))
        await rig.fetch()
        assert rig.store.run(CHAIN) == 0

    simulate(work)


def test_a_store_without_room_says_nothing_against_a_tier() -> None:
    async def work() -> None:
        rig = Rig(redis(block_s=0.001), store=StoreDouble(full=True))
        for _ in range(20):
            await rig.fetch()
        rig.store.full = False
        await rig.fetch()
        assert rig.store.run(CHAIN) == len(CHAIN)
        assert rig.figure("redis", "declined") == 0

    simulate(work)


def test_who_answers_is_not_held_up_by_who_does_not() -> None:
    async def work() -> None:
        rig = Rig(redis(ask_s=10.0), lmdb(ask_s=0.001, block_s=0.0001))
        assert await rig.fetch(block_s=None) < 0.1
        assert rig.store.run(CHAIN) == 32

    simulate(work)


def test_without_an_economy_all_that_is_there_comes_however_slowly() -> None:
    async def work() -> None:
        rig = Rig(redis(ask_s=1.0, block_s=1.0))
        assert await rig.fetch(block_s=None) == pytest.approx(33.0)
        assert rig.store.run(CHAIN) == 32

    simulate(work)
