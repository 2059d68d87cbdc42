"""Fetches at the same time, fetches that are given up, and peers that do not answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from cachemgr import BlockHash
from tests.cachemgr.cluster.fetch.nodes import Cluster, Lag, cluster

SLACK_S = 0.04
"""What may be added to a deadline, beside the lag of a busy machine."""


def not_ours(owners: list[tuple[str, ...]]) -> bool:
    return all("n0" not in of_segment for of_segment in owners)


def in_loop(c: Cluster, test: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        await test()
        await c.settle()
        await turns()  # what was cancelled a moment ago ends in these
        assert c.fetcher._flights == {}, "nothing is left of a flight that is over"
        assert not c.fetcher._gets._going

    asyncio.run(go())


def start(c: Cluster, hashes: list[BlockHash], *, within: float = 5.0) -> "asyncio.Task[None]":
    return asyncio.create_task(c.fetcher.fetch(c.me.store, hashes, deadline=time.monotonic() + within))


def travelled(c: Cluster) -> int:
    return sum(sum(peer.served.values()) for peer in c.peers.values())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def gated(c: Cluster) -> asyncio.Event:
    """Peers answer once it is set."""
    gate = asyncio.Event()
    for peer in c.peers.values():
        peer.gate = gate
    return gate


def test_fetches_of_the_same_prompt_share_each_transfer() -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(80, where=not_ours)
        c.place_all(hashes)

        async def test() -> None:
            await asyncio.gather(*(start(c, hashes) for _ in range(10)), start(c, hashes[:40]))

        in_loop(c, test)
        assert c.me.has(hashes) == list(range(80))
        assert travelled(c) == 80
        assert sorted(name for asked in c.gets for name in asked) == sorted(hashes)


def test_a_longer_prompt_joins_what_is_on_its_way_and_asks_for_the_rest() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        c.place_all(hashes)

        async def test() -> None:
            gate = gated(c)
            short = start(c, hashes[:8])
            await turns()
            long = start(c, hashes)
            await turns()
            assert c.gets == [hashes[:8], hashes[8:]]
            gate.set()
            await asyncio.gather(short, long)
            assert c.me.has(hashes) == list(range(16))

        in_loop(c, test)


def test_a_block_whose_slot_is_reserved_is_waited_for_as_well() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(1, where=not_ours)
        c.place_all(hashes)
        owner = c.peers[c.owners(hashes, 0)[0]]

        async def test() -> None:
            owner.midway = asyncio.Event()
            one = start(c, hashes)
            await turns()
            assert c.me.store.missing(hashes) == [], "it is being written"
            two = start(c, hashes)
            await turns()
            assert not two.done()
            one.cancel()
            await turns()
            owner.midway.set()
            await two
            assert c.me.cache.lookup(hashes) == 1

        in_loop(c, test)


@pytest.mark.parametrize("first_leaves", [True, False])
def test_cancelling_one_does_not_cancel_the_other(first_leaves: bool) -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        c.place_all(hashes)

        async def test() -> None:
            gate = gated(c)
            one = start(c, hashes)
            await turns()
            two = start(c, hashes)
            await turns()
            leaves, stays = (one, two) if first_leaves else (two, one)
            leaves.cancel()
            await turns()
            assert leaves.cancelled()
            gate.set()
            await stays
            assert c.me.has(hashes) == list(range(16))
            assert travelled(c) == 16

        in_loop(c, test)


def test_when_all_have_left_the_request_is_taken_back() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(64, where=not_ours)
        c.place_all(hashes)

        async def test() -> None:
            gated(c)
            tasks = [start(c, hashes) for _ in range(3)]
            await turns()
            assert sum(peer.under_way for peer in c.peers.values()) == 1
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await turns()
            assert sum(peer.under_way for peer in c.peers.values()) == 0

        in_loop(c, test)
        assert c.me.has(hashes) == []


def test_who_joins_with_more_time_gets_it() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        c.place_all(hashes)
        owner = c.peers[c.owners(hashes, 0)[0]]
        owner.trickle_s = 0.02

        async def test() -> None:
            short = start(c, hashes, within=0.1)
            await turns()
            long = start(c, hashes, within=5.0)
            await short
            assert len(c.me.has(hashes)) < 16
            await long
            assert c.me.has(hashes) == list(range(16))
            assert travelled(c) == 16

        in_loop(c, test)


@pytest.mark.parametrize("trouble", ["silent", "deaf", "raises"])
def test_one_bad_owner_costs_one_look_up(trouble: str) -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(64, where=lambda owners: not_ours(owners) and all("n1" in both for both in owners))
        c.place_all(hashes)
        setattr(c.peers["n1"], trouble, True)
        c.peers["n1"].load, c.peers["n2"].load, c.peers["n3"].load = 0.0, 9.0, 9.0

        async def test() -> None:
            began = time.monotonic()
            async with Lag() as lag:
                await start(c, hashes)
                took = time.monotonic() - began
            assert took < 2 * 0.05 + SLACK_S + 3 * lag.worst_s
            assert len(c.peers["n1"].gets) == 1
            assert c.me.has(hashes) == list(range(64))

        in_loop(c, test)


@pytest.mark.parametrize("trouble", ["silent", "deaf"])
@pytest.mark.parametrize("within", [0.0, 0.03, 0.2])
def test_a_fetch_ends_by_its_deadline_when_nobody_answers(trouble: str, within: float) -> None:
    with cluster(nodes=6, replicas=3) as c:
        hashes = c.chain(256)
        for peer in c.peers.values():
            setattr(peer, trouble, True)

        async def test() -> None:
            began = time.monotonic()
            async with Lag() as lag:
                await start(c, hashes, within=within)
                took = time.monotonic() - began
            assert took < within + SLACK_S + lag.worst_s

        in_loop(c, test)


def test_what_arrived_by_the_deadline_stays() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        c.place_all(hashes)
        c.peers[c.owners(hashes, 0)[0]].trickle_s = 0.06

        async def test() -> None:
            began = time.monotonic()
            async with Lag() as lag:
                await start(c, hashes, within=0.5)
                took = time.monotonic() - began
            assert took < 0.5 + SLACK_S + lag.worst_s

        in_loop(c, test)
        assert 2 <= len(c.me.has(hashes)) < 16
        assert c.me.has(hashes) == list(range(len(c.me.has(hashes)))), "in the order of the chain"


def test_a_slow_transfer_that_has_begun_is_not_cut_off() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        c.place_all(hashes)
        c.peers[c.owners(hashes, 0)[0]].trickle_s = 0.01

        async def test() -> None:
            await start(c, hashes)

        in_loop(c, test)
        assert c.me.has(hashes) == list(range(16))
        assert len(c.gets) == 1


def test_a_slow_peer_does_not_hold_up_the_others() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(48, where=lambda owners: owners == [("n1",), ("n2",), ("n3",)])
        c.place_all(hashes)
        c.peers["n2"].trickle_s = 0.01

        async def test() -> None:
            fetch = start(c, hashes)
            await asyncio.sleep(0.08)
            assert not fetch.done()
            assert len(c.me.has(hashes[:16])) == len(c.me.has(hashes[32:])) == 16
            await fetch

        in_loop(c, test)
        assert c.me.has(hashes) == list(range(48))


def test_forgetting_a_store_ends_its_fetches_before_it_returns() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(64, where=not_ours)
        c.place_all(hashes)

        async def test() -> None:
            gated(c)
            fetch = start(c, hashes)
            await turns()
            await c.fetcher.forget(c.me.store)
            assert sum(peer.under_way for peer in c.peers.values()) == 0
            await fetch

        in_loop(c, test)


def test_after_close_nothing_is_asked() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        c.place_all(hashes)

        async def test() -> None:
            await c.fetcher.close()
            await start(c, hashes)

        in_loop(c, test)
        assert c.gets == []
