"""A hot segment reaches its extra owners before anybody hears of them."""

import asyncio
import time

from cachemgr import BlockHash
from cachemgr.cluster.background import Pace
from cachemgr.cluster.fetch.hot_spread import HotSpread
from cachemgr.cluster.moves.giver import Giver
from tests.cachemgr.cluster.fetch.nodes import Cluster, cluster


def spread(c: Cluster, *, bytes_per_s: float = 1e9) -> HotSpread:
    giver = Giver(Pace(bytes_per_s, clock=time.monotonic), call_s=1.0, clock=time.monotonic)
    return HotSpread(lambda: [c.me.store], c.seen, giver)


def hot_prompt(c: Cluster) -> list[BlockHash]:
    """Two segments, the second one not whole."""
    hashes = c.chain(24)
    c.place(hashes, range(24), "n0")
    return hashes


def test_all_blocks_of_the_segment_and_no_others_are_given() -> None:
    with cluster() as c:
        hashes = hot_prompt(c)
        nodes = (c.peers["n2"].node, c.peers["n3"].node)
        assert asyncio.run(spread(c)(hashes[16], nodes)) == 2
        for node in nodes:
            assert c.nodes[node].has(hashes) == list(range(16, 24))
        assert c.nodes["n1"].has(hashes) == []


def test_only_the_first_ones_without_a_gap_count() -> None:
    with cluster(nodes=5) as c:
        hashes = hot_prompt(c)
        c.peers["n2"].usable = False
        nodes = tuple(c.peers[name].node for name in ("n1", "n2", "n3"))
        assert asyncio.run(spread(c)(hashes[0], nodes)) == 1


def test_who_has_it_already_costs_no_bytes() -> None:
    with cluster() as c:
        hashes = hot_prompt(c)
        c.place(hashes, range(16), "n0", "n1")
        assert asyncio.run(spread(c)(hashes[0], (c.peers["n1"].node,))) == 1
        assert c.peers["n1"].puts == []


def test_what_is_not_here_is_given_to_nobody() -> None:
    with cluster() as c:
        assert asyncio.run(spread(c)(c.chain(16)[0], (c.peers["n1"].node,))) == 0


def test_forgetting_the_store_ends_it() -> None:
    with cluster() as c:
        hashes = hot_prompt(c)

        async def go() -> None:
            slow = spread(c, bytes_per_s=1.0)
            first = asyncio.create_task(slow(hashes[0], (c.peers["n1"].node,)))
            second = asyncio.create_task(slow(hashes[0], (c.peers["n2"].node,)))
            await asyncio.sleep(0.05)
            await slow.forget(c.me.store)
            began = time.monotonic()
            assert sorted(await asyncio.gather(first, second)) in ([0, 0], [0, 1])
            assert time.monotonic() - began < 1
            assert slow._giving == {}

        asyncio.run(go())
