"""Which block comes from where, what is given up, and when: in simulated time, against tiers in memory."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr import BlockHash
from cachemgr.shard import BlockAddress
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.fetching import PEER, TieredFetch
from tests.cachemgr.tiers.doubles import NBYTES, PeersDouble, StoreDouble, TierDouble, names
from tests.cachemgr.tiers.simulated_time import clock, simulate

CHAIN = names(32)
BLOCK_S = 0.015
ALL_S = len(CHAIN) * BLOCK_S


class Rig:
    """A store, and what is beyond it."""

    def __init__(
        self, *tiers: TierDouble, peers: PeersDouble | None = None, store: StoreDouble | None = None
    ) -> None:
        self.store = store or StoreDouble()
        self.came: list[tuple[str, list[int]]] = []
        self.fetching = TieredFetch(peers, tiers, clock=clock, came=self._came)

    def _came(self, store: StoreDouble, blocks: Sequence[BlockAddress], tier: LowerTier) -> None:
        self.came.append((tier.name, [block.index for block in blocks]))

    async def fetch(
        self,
        chain: Sequence[BlockHash] = CHAIN,
        *,
        block_s: float | None = BLOCK_S,
        limit_s: float = 60.0,
    ) -> float:
        """What it took."""
        began = clock()
        await self.fetching.fetch(self.store, chain, deadline=began + limit_s, block_s=block_s)
        return clock() - began

    def figure(self, tier: str, name: str) -> float:
        return self.fetching.counters()[tier][f"tier_{name}_total"]

    def forgotten(self) -> bool:
        """Is nothing on its way, and nothing kept about what was?"""
        return self.fetching.idle and not len(self.fetching._flights)


async def settle() -> None:
    """What was cancelled hears of it, and those who wait for its end."""
    for _ in range(4):
        await asyncio.sleep(0)


def redis(**options: float) -> TierDouble:
    return TierDouble("redis", CHAIN, **options)


def lmdb(**options: float) -> TierDouble:
    return TierDouble("lmdb", CHAIN, **options)


# From where.


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


# What is given up, and when.


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


# However blocks come.


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


# Together.


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


# The end.


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
