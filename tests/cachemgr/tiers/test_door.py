"""The step loop's door: `done` exactly once whatever happens, and nobody ever waits in it."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from cachemgr import BlockHash
from cachemgr.cluster.fetch.fetcher import Fetcher
from cachemgr.host_contract import HostStore
from cachemgr.tiers.door import TiersDoor
from tests.cachemgr import host
from tests.cachemgr.cluster.fetch.nodes import cluster
from tests.waiting import wait_until

CHAIN = [BlockHash(bytes([at]) * 16) for at in range(4)]


class Io:
    """A loop in a thread of its own, and what the door calls there."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.behave: Callable[[], None] = lambda: None
        self.seconds = 0.0
        self.offered: list[int] = []
        self.asked: list[float | None] = []
        self.used_again: list[Sequence[BlockHash]] = []
        self.under_way = 0
        self.forgotten = 0
        self.doors: list[TiersDoor] = []

    def door(self, **options: int) -> TiersDoor:
        store: HostStore = None  # type: ignore[assignment]  # nobody looks at it here
        self.doors.append(TiersDoor(store, loop=self.loop, beyond=self, **options))
        return self.doors[-1]

    async def fetch(
        self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float, block_s: float | None
    ) -> None:
        self.asked.append(block_s)
        self.under_way += 1
        try:
            self.behave()
            if self.seconds:
                await asyncio.sleep(self.seconds)
        finally:
            self.under_way -= 1

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        self.behave()
        self.offered.append(index)

    def used(self, store: HostStore, hashes: Sequence[BlockHash]) -> None:
        self.used_again.append(hashes)

    async def forget(self, store: HostStore) -> None:
        self.forgotten += 1

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
        self.loop.close()


@pytest.fixture
def io() -> Iterator[Io]:
    io = Io()
    yield io
    for door in io.doors:
        door.close()
    io.stop()


class Done:
    """Counts calls; an instance per fetch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def fetch(door: TiersDoor) -> tuple[Done, Callable[[], None]]:
    done = Done()
    return done, door.fetch(CHAIN, deadline=time.monotonic() + 5, done=done)


def test_done_follows_the_fetch(io: Io) -> None:
    door = io.door()
    assert door.active
    done, give_up = fetch(door)
    wait_until(lambda: done.calls)
    give_up()
    give_up()
    door.close()
    assert done.calls == 1


def test_a_fetch_that_raises_is_done_and_counted(io: Io, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("our own bug")

    io.behave = broken
    door = io.door()
    done, _ = fetch(door)
    wait_until(lambda: done.calls)
    assert door.counters()["beyond_failed_fetches_total"] == 1
    assert "our own bug" in caplog.text


def test_giving_up_cancels_the_fetch_and_it_is_done(io: Io) -> None:
    io.seconds = 60
    door = io.door()
    done, give_up = fetch(door)
    wait_until(lambda: io.under_way)
    give_up()
    wait_until(lambda: done.calls)
    assert io.under_way == 0


def test_giving_up_one_leaves_the_others(io: Io) -> None:
    io.seconds = 60
    door = io.door()
    (one, give_up), (two, _) = fetch(door), fetch(door)
    wait_until(lambda: io.under_way == 2)
    give_up()
    wait_until(lambda: one.calls)
    assert (two.calls, io.under_way) == (0, 1)


def test_more_than_the_limit_are_done_at_once_and_counted(io: Io) -> None:
    io.seconds = 60
    door = io.door(limit=3)
    calls = [fetch(door)[0] for _ in range(5)]
    assert [done.calls for done in calls] == [0, 0, 0, 1, 1]
    assert door.counters()["beyond_refused_fetches_total"] == 2
    door.close()
    assert [done.calls for done in calls] == [1] * 5


def test_close_waits_until_nobody_uses_the_store(io: Io) -> None:
    io.seconds = 60
    door = io.door()
    calls = [fetch(door)[0] for _ in range(10)]
    door.close()
    assert [done.calls for done in calls] == [1] * 10
    assert (io.under_way, io.forgotten) == (0, 1)
    late, _ = fetch(door)
    assert late.calls == 1
    door.offer(CHAIN, 0)
    door.close()
    assert io.offered == []


def test_close_on_the_io_thread_is_refused(io: Io) -> None:
    door = io.door()

    async def close() -> None:
        door.close()

    with pytest.raises(RuntimeError, match="wait for itself"):
        asyncio.run_coroutine_threadsafe(close(), io.loop).result()


def test_a_loop_that_is_gone_is_a_miss(io: Io) -> None:
    door = io.door()
    io.stop()
    done, give_up = fetch(door)
    assert done.calls == 1
    give_up()
    door.offer(CHAIN, 0)
    door.close()
    assert done.calls == 1


def test_a_loop_that_stopped_under_a_fetch_is_a_miss_at_close(io: Io) -> None:
    io.seconds = 60
    door = io.door()
    done, give_up = fetch(door)
    wait_until(lambda: io.under_way)
    io.loop.call_soon_threadsafe(io.loop.stop)
    io.thread.join()
    give_up()
    door.close()
    assert done.calls == 1
    io.loop.run_until_complete(asyncio.sleep(0))  # the task hears of its cancellation
    assert done.calls == 1


def test_done_that_raises_harms_nobody(io: Io, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("whoever was waiting")

    door = io.door()
    door.fetch(CHAIN, deadline=0.0, done=broken)
    wait_until(lambda: "whoever was waiting" in caplog.text)
    done, _ = fetch(door)
    wait_until(lambda: done.calls)


def test_offers_reach_the_replicator_in_order(io: Io) -> None:
    door = io.door()
    for index in range(500):
        door.offer(CHAIN, index)
    wait_until(lambda: len(io.offered) == 500)
    assert io.offered == list(range(500))


def test_use_and_the_price_of_a_block_are_told(io: Io) -> None:
    door = io.door()
    door.used(CHAIN[:2])
    done = Done()
    door.fetch(CHAIN, deadline=time.monotonic() + 5, done=done, block_s=0.25)
    wait_until(lambda: done.calls)
    assert (io.used_again, io.asked, io.offered) == ([CHAIN[:2]], [0.25], [])


def test_offers_that_wait_are_bounded(io: Io) -> None:
    door = io.door(offers=10)
    hold = threading.Event()
    io.loop.call_soon_threadsafe(hold.wait)
    for index in range(25):
        door.offer(CHAIN, index)
    hold.set()
    wait_until(lambda: len(io.offered) == 10)
    assert io.offered == list(range(10))
    assert door.counters()["beyond_dropped_offers_total"] == 15


def test_an_offer_that_raises_is_counted_and_the_next_goes_on(
    io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    turn = iter(range(10))

    def sometimes() -> None:
        if next(turn) == 1:
            raise ValueError("our own bug")

    io.behave = sometimes
    door = io.door()
    for index in range(3):
        door.offer(CHAIN, index)
    wait_until(lambda: io.offered == [0, 2])
    assert door.counters()["beyond_failed_offers_total"] == 1


def test_it_never_blocks_the_step_loop(io: Io) -> None:
    door = io.door()
    hold = threading.Event()
    io.loop.call_soon_threadsafe(hold.wait)
    began = time.monotonic()
    calls = [fetch(door) for _ in range(200)]
    for _done, give_up in calls:
        give_up()
    door.offer(CHAIN, 0)
    assert time.monotonic() - began < 1
    assert sum(done.calls for done, _ in calls) == 0
    hold.set()
    wait_until(lambda: all(done.calls for done, _ in calls))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_done_exactly_once_under_random_faults(seed: int) -> None:
    """Several threads ask and give up while fetches end, fail, hang, and the door or the loop closes."""
    dice = random.Random(seed)
    io = Io()
    door = io.door(limit=40)
    calls: list[Done] = []

    def behave() -> None:
        io.seconds = dice.choice((0.0, 0.0, 0.001, 30.0))
        if dice.random() < 0.2:
            raise ValueError("our own bug")

    io.behave = behave

    def step_loop() -> None:
        for _ in range(150):
            done, give_up = fetch(door)
            calls.append(done)
            if dice.random() < 0.6:
                give_up()

    threads = [threading.Thread(target=step_loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(dice.random() * 0.05)
    if seed % 2:
        door.close()
    for thread in threads:
        thread.join()
    door.close()
    io.stop()
    assert len(calls) == 450
    assert Counter(done.calls for done in calls) == {1: 450}


class Fetching:
    """The part of Sources that a fetcher is."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    async def fetch(
        self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float, block_s: float | None
    ) -> None:
        await self._fetcher.fetch(store, hashes, deadline=deadline)

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        pass

    def used(self, store: HostStore, hashes: Sequence[BlockHash]) -> None:
        pass

    async def forget(self, store: HostStore) -> None:
        await self._fetcher.forget(store)


def test_a_cache_reads_through_it_from_another_node() -> None:
    """The real thing: lease → door → fetcher → host tier, and every byte is right."""
    with cluster(replicas=1) as c:
        io = Io()
        sources = Fetching(c.fetcher)
        c.me.cache.reach_beyond(lambda store: TiersDoor(store, loop=io.loop, beyond=sources))
        hashes = c.chain(64, where=lambda owners: all("n0" not in both for both in owners))
        c.place_all(hashes)
        lease = c.me.cache.acquire(hashes, deadline=time.monotonic() + 5)
        wait_until(lambda: lease.ready)
        assert lease.blocks == 64
        lease.release()
        assert host.read(c.me.cache, hashes) == 64
        c.me.cache.close()
        io.stop()
