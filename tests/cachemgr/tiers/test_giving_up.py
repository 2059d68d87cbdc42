"""What a fetch gives up, and when: in simulated time, against tiers in memory."""

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.tiers.fetching import PEER
from tests.cachemgr.tiers.doubles import NBYTES, PeersDouble, StoreDouble, TierDouble, names
from tests.cachemgr.tiers.fetch_rig import ALL_S, BLOCK_S, CHAIN, Rig, lmdb, redis, settle
from tests.cachemgr.tiers.simulated_time import simulate


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("slow", ["ask", "get", "peers"])
@pytest.mark.parametrize("block_s", [None, BLOCK_S])
def test_it_ends_by_the_deadline_whatever_they_do(slow: str, deaf: bool, block_s: float | None) -> None:
    async def work() -> None:
        tier, peers = redis(), PeersDouble()
        tier.deaf = deaf
        if slow == "ask":
            tier.ask_s = 1000.0
        elif slow == "get":
            tier.first_s = 1000.0
        else:
            peers.ask_s = 1000.0
        rig = Rig(tier, peers=peers)
        assert await rig.fetch(limit_s=0.01, block_s=block_s) <= 0.01 + 1e-6
        await settle()
        assert (tier.under_way, peers.under_way) == (0, 0)
        who = PEER if slow == "peers" else "redis"
        if block_s is None:
            assert rig.figure(who, "deadlines") == 1

    simulate(work)


def test_a_past_deadline_asks_nobody() -> None:
    async def work() -> None:
        rig = Rig(tier := redis())
        await rig.fetch(limit_s=-1.0)
        assert tier.asks == []

    simulate(work)


@pytest.mark.parametrize("slow", ["ask", "get", "peers"])
def test_who_stalls_costs_less_than_a_tenth_even_the_first_time(slow: str) -> None:
    async def work() -> None:
        tier, peers = redis(), PeersDouble()
        setattr(peers if slow == "peers" else tier, "first_s" if slow == "get" else "ask_s", 1000.0)
        rig = Rig(tier, peers=peers)
        lost = await rig.fetch() - rig.store.run(CHAIN) * BLOCK_S
        assert lost <= 0.1 * ALL_S
        assert rig.figure(PEER if slow == "peers" else "redis", "cut") == 1

    simulate(work)


def test_peers_that_stall_leave_time_for_the_tiers() -> None:
    async def work() -> None:
        rig = Rig(redis(ask_s=0.001, block_s=0.001), peers=PeersDouble(ask_s=1000.0))
        await rig.fetch()
        assert rig.store.run(CHAIN) == 32

    simulate(work)


def test_what_came_before_the_cut_stays() -> None:
    async def work() -> None:
        rig = Rig(tier := redis())
        tier.pauses = [0.001] * 20 + [1000.0]
        assert await rig.fetch() <= 0.02 + 20 * BLOCK_S / 4 + 0.1 * ALL_S
        await settle()
        assert rig.store.run(CHAIN) == 20
        assert rig.came == [("redis", list(range(32)))]
        assert rig.store.reserved == set()

    simulate(work)


def test_nothing_is_fetched_behind_a_block_that_hangs() -> None:
    async def work() -> None:
        hanging, other = TierDouble("redis", CHAIN), TierDouble("lmdb", CHAIN[3:], ask_s=0.001)
        rig = Rig(hanging, other)
        for _ in range(9):  # so slow that it is only tried now and then
            rig.fetching._costs.of("redis", NBYTES).silent(0.5)
        await asyncio.sleep(600)
        hanging.pauses, hanging.clings = [0.001, 0.001, 1000.0], True
        took = await rig.fetch()
        assert rig.figure("redis", "trials") >= 1
        assert rig.store.run(CHAIN) == 2
        assert (took, other.gets) == (pytest.approx(0.02, abs=0.02), [])

    simulate(work)


def test_nor_behind_one_that_hangs_at_a_peer() -> None:
    async def work() -> None:
        peers = PeersDouble(CHAIN)
        peers.hangs_at = 3
        rig = Rig(tier := redis(ask_s=0.001, block_s=0.001), peers=peers)
        await rig.fetch()
        assert (rig.store.run(CHAIN), tier.gets) == (3, [])

    simulate(work)


def test_a_tier_that_was_cut_is_not_asked_again_for_the_same_prompt() -> None:
    async def work() -> None:
        rig = Rig(tier := redis())
        for _ in range(9):
            rig.fetching._costs.of("redis", NBYTES).silent(0.5)
        await asyncio.sleep(600)
        tier.pauses = [0.001, 0.001, 1000.0]
        await rig.fetch()
        assert (rig.store.run(CHAIN), len(tier.gets)) == (2, 1)

    simulate(work)


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("slow", ["ask_s", "first_s"])
def test_a_tier_that_stalls_is_soon_not_asked_any_more(slow: str, deaf: bool) -> None:
    async def work() -> None:
        rig = Rig(tier := redis())
        setattr(tier, slow, 1000.0)
        tier.deaf = deaf
        losses = [await rig.fetch() for _ in range(12)]
        assert losses[4:] == [0.0] * 8
        assert 0 < max(losses) <= 0.1 * ALL_S

    simulate(work)


def test_a_tier_that_was_in_trouble_is_used_as_soon_as_it_works_again() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(ask_s=1000.0))
        for _ in range(12):
            await rig.fetch()
        tier.usable = False
        await rig.fetch()
        tier.usable, tier.ask_s = True, 0.001
        await rig.fetch()
        assert rig.store.run(CHAIN) == 32

    simulate(work)


def test_a_tier_that_delays_every_block_is_soon_not_asked_any_more() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(ask_s=0.02, block_s=0.02))
        losses = []
        for _ in range(20):
            rig.store.here.clear()
            losses.append(await rig.fetch() - rig.store.run(CHAIN) * BLOCK_S)
        assert max(losses) <= 0.1 * ALL_S
        assert losses[5:] == [0.0] * 15
        assert rig.figure("redis", "declined") >= 10
        assert len(tier.asks) <= 5

    simulate(work)


def test_a_tier_that_recovered_is_used_again_and_little_is_risked_to_see_that() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(ask_s=1000.0))
        for _ in range(5):
            await rig.fetch()
        tier.ask_s, tier.block_s = 0.001, 0.001
        lost = []
        for _ in range(600):
            await asyncio.sleep(1.0)
            rig.store.here.clear()
            took = await rig.fetch()
            lost.append(took - rig.store.run(CHAIN) * BLOCK_S)
            if rig.store.run(CHAIN) == 32:
                break
        assert rig.store.run(CHAIN) == 32
        assert max(lost) <= 0.03 * ALL_S
        assert len(lost) < 120

    simulate(work)


def test_one_slow_fetch_is_no_reason_to_give_a_tier_up() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(ask_s=0.001, block_s=0.001))
        await rig.fetch()
        rig.store.here.clear()
        tier.pauses = [1000.0]
        await rig.fetch()
        tier.pauses = None
        await rig.fetch()
        assert rig.store.run(CHAIN) == 32

    simulate(work)


def test_cancelled_fetches_say_nothing_against_a_tier() -> None:
    async def work() -> None:
        rig = Rig(tier := redis(ask_s=0.001))
        tier.pauses = [1000.0]
        for _ in range(20):
            fetch = asyncio.ensure_future(rig.fetch())
            await asyncio.sleep(0.03)
            fetch.cancel()
            await asyncio.wait([fetch])
        assert tier.under_way == 0
        tier.pauses = None
        await rig.fetch()
        assert rig.store.run(CHAIN) == 32

    simulate(work)


def test_a_decision_is_explained_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        rig = Rig(redis(), lmdb(), peers=PeersDouble(), store=StoreDouble(CHAIN[:4]))
        await rig.fetch()

    with caplog.at_level(logging.DEBUG, logger="cachemgr.tiers.fetching"):
        simulate(work)
    (line,) = [record.getMessage() for record in caplog.records if "tiers.fetching" in record.name]
    assert "32 blocks, 4 here, 28 missing, 15.0 ms each to compute: peers brought 0" in line
    for told in ("redis has 28 in ", "lmdb has 28 in ", "28 from redis", "32 usable"):
        assert told in line


@settings(max_examples=150)
@given(
    pauses=st.lists(st.floats(0, 0.03) | st.sampled_from([0.0, 0.5, 100.0]), min_size=24, max_size=24),
    ask_s=st.floats(0, 0.1),
    peers_s=st.one_of(st.none(), st.floats(0, 0.1)),
    block_s=st.floats(0.001, 0.05),
    prompts=st.integers(1, 4),
    deaf=st.booleans(),
)
def test_time_lost_is_a_tenth_at_most(
    pauses: list[float], ask_s: float, peers_s: float | None, block_s: float, prompts: int, deaf: bool
) -> None:
    async def work() -> None:
        chain = names(24)
        tier = TierDouble("redis", chain, ask_s=ask_s)
        other = TierDouble("lmdb", chain[:12], ask_s=ask_s / 3, block_s=block_s / 2)
        tier.pauses = pauses
        peers = None if peers_s is None else PeersDouble(chain[:5], ask_s=peers_s, block_s=peers_s)
        tier.deaf = deaf
        rig = Rig(tier, other, peers=peers)
        for _ in range(prompts):
            rig.store.here.clear()
            took = await rig.fetch(chain, block_s=block_s)
            lost = took - rig.store.run(chain) * block_s
            assert lost <= 0.1 * len(chain) * block_s + block_s
        await settle()
        assert rig.store.reserved == set()
        assert rig.forgotten()

    simulate(work)
