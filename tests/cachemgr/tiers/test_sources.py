"""Peers and tiers together: opened, used and let go of as one."""

import asyncio
from collections.abc import Sequence

import pytest

from cachemgr import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.tiers.sources import Sources
from tests.cachemgr.tiers.doubles import PeersDouble, StoreDouble, TierDouble, names
from tests.cachemgr.tiers.simulated_time import clock, simulate

CHAIN = names(16)


class NodeDouble(PeersDouble):
    """As much of a ClusterNode as there is to see."""

    fails_to_open = False

    def __init__(self, has: Sequence[BlockHash] = (), **options: float) -> None:
        super().__init__(has, **options)
        self.calls: list[str] = []

    async def open(self) -> None:
        if self.fails_to_open:
            raise ValueError("a wrong setting")
        self.calls.append("open")

    def take_in(self, store: HostStore) -> None:
        self.calls.append("take in")

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        self.calls.append(f"offer {index}")

    async def forget(self, store: HostStore) -> None:
        self.calls.append("forget")

    def counters(self) -> dict[str, float]:
        return {"cluster_fetches_total": 3.0}

    async def close(self) -> None:
        self.calls.append("close")


def sources(node: NodeDouble | None, *tiers: TierDouble) -> Sources:
    return Sources(node, tiers, clock=clock)  # type: ignore[arg-type]


def test_without_tiers_it_is_the_cluster_alone() -> None:
    async def work() -> None:
        node = NodeDouble(CHAIN, block_s=10.0)
        beyond = sources(node)
        store = StoreDouble()
        await beyond.open()
        beyond.take_in(store)
        await beyond.fetch(store, CHAIN, deadline=clock() + 7, block_s=0.001)
        assert node.deadlines == [1007.0]
        assert store.run(CHAIN) == 16
        beyond.offer(store, CHAIN, 2)
        beyond.used(store, CHAIN)
        assert beyond.counters() == {"peer": {"cluster_fetches_total": 3.0}}
        await beyond.forget(store)
        await beyond.close()
        assert node.calls == ["open", "take in", "offer 2", "forget", "close"]

    simulate(work)


def test_with_nothing_there_is_nothing() -> None:
    async def work() -> None:
        beyond, store = sources(None), StoreDouble(CHAIN)
        await beyond.open()
        beyond.take_in(store)
        await beyond.fetch(store, CHAIN, deadline=clock() + 7, block_s=None)
        beyond.offer(store, CHAIN, 2)
        beyond.used(store, CHAIN)
        await beyond.forget(store)
        assert beyond.counters() == {}
        await beyond.close()

    simulate(work)


def test_what_goes_down_comes_back_and_up() -> None:
    async def work() -> None:
        redis, lmdb = TierDouble("redis", admit_seen=2), TierDouble("lmdb")
        node = NodeDouble()
        beyond, store = sources(node, redis, lmdb), StoreDouble(CHAIN)
        store.seen.update(CHAIN)
        await beyond.open()
        for index in range(16):
            beyond.offer(store, CHAIN, index)
        await asyncio.sleep(0.01)
        assert (redis.put_names, lmdb.put_names) == ([], CHAIN)
        store.here.clear()
        store.seen.update(CHAIN)
        await beyond.fetch(store, CHAIN, deadline=clock() + 7, block_s=None)
        await asyncio.sleep(0.01)
        assert store.run(CHAIN) == 16
        assert (redis.put_names, lmdb.put_names) == (CHAIN, CHAIN)
        await beyond.close()
        assert node.calls == ["open", *(f"offer {index}" for index in range(16)), "close"]

    simulate(work)


def test_figures_are_by_tier() -> None:
    async def work() -> None:
        beyond = sources(NodeDouble(), TierDouble("redis", CHAIN))
        await beyond.fetch(StoreDouble(), CHAIN, deadline=clock() + 7, block_s=None)
        await asyncio.sleep(0.01)
        figures = beyond.counters()
        assert set(figures) == {"peer", "redis"}
        assert figures["peer"]["cluster_fetches_total"] == 3
        assert figures["peer"]["tier_asks_total"] == 1
        assert figures["redis"]["tier_get_blocks_total"] == 1
        assert figures["redis"]["tier_queue_blocks"] == 2
        assert figures["redis"]["tier_fetched_blocks_total"] == 16
        assert figures["redis"]["tier_offered_blocks_total"] == 0

    simulate(work)


@pytest.mark.parametrize("who", ["node", "tier"])
def test_what_cannot_be_opened_leaves_nothing_behind(who: str) -> None:
    async def work() -> None:
        node, first, second = NodeDouble(), TierDouble("redis"), TierDouble("lmdb")
        node.fails_to_open = who == "node"
        second.fails_to_start = who == "tier"
        with pytest.raises(ValueError, match="wrong setting" if who == "node" else "our own bug"):
            await sources(node, first, second).open()
        assert (first.closed, second.closed) == (1, 1)
        assert node.calls == ([] if who == "node" else ["open", "close"])

    simulate(work)


def test_forget_ends_what_uses_the_store_everywhere() -> None:
    async def work() -> None:
        redis, node = TierDouble("redis", CHAIN, block_s=1.0), NodeDouble()
        beyond, store = sources(node, redis), StoreDouble()
        fetch = asyncio.ensure_future(beyond.fetch(store, CHAIN, deadline=clock() + 60, block_s=None))
        await asyncio.sleep(3.5)
        await beyond.forget(store)
        await fetch
        assert store.reserved == set()
        assert (redis.forgotten, node.calls) == ([store], ["forget"])
        await asyncio.sleep(1)
        assert (redis.under_way, redis.puts) == (0, [])

    simulate(work)
