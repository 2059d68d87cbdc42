"""Owners that a read found without a block are given it."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from cachemgr import BlockHash
from cachemgr.ring import NodeSpec, add_node
from cachemgr.shard import address_of
from tests.cachemgr.cluster.fetch.nodes import Cluster, cluster


def not_ours(owners: list[tuple[str, ...]]) -> bool:
    return all("n0" not in of_segment for of_segment in owners)


def asked_first(c: Cluster, node: str) -> None:
    """Whoever else can be asked looks busy."""
    for peer in c.peers.values():
        peer.load = 0.0 if peer.node == node else 1.0


def test_an_owner_that_was_asked_first_and_lacks_a_block_is_given_it() -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(40, where=lambda owners: not_ours(owners) and len(set(owners)) == 1)
        lacks, has = c.owners(hashes, 0)
        c.place(hashes, range(0, 40, 2), lacks)
        c.place(hashes, range(40), has)
        asked_first(c, lacks)
        c.fetch(hashes)
        assert c.nodes[lacks].has(hashes) == list(range(40))
        assert sorted(n for put in c.peers[lacks].puts for n in put) == sorted(hashes[1::2])
        assert c.repair.counters()["cluster_read_repaired_blocks_total"] == 20


def test_an_owner_is_given_what_only_the_ring_before_had() -> None:
    with cluster(nodes=5, replicas=0, on_ring=4) as c:
        before = c.rings.ring
        c.rings.install(add_node(before.state, NodeSpec("n4", "127.0.0.1:7000")))
        hashes = c.chain(16, where=lambda owners: owners == [("n4",)])
        while "n0" in before.owners(int.from_bytes(hashes[0][:8], "little"), 1):
            hashes = c.chain(16, where=lambda owners: owners == [("n4",)])
        c.place(hashes, range(16), *before.owners(int.from_bytes(hashes[0][:8], "little"), 1))
        c.fetch(hashes)
        assert c.nodes["n4"].has(hashes) == list(range(16))


def test_nobody_is_given_what_he_was_not_asked_for() -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(16, where=not_ours)
        has, lacks = c.owners(hashes, 0)
        c.place(hashes, range(16), has)
        asked_first(c, has)
        c.fetch(hashes)
        assert c.peers[lacks].puts == []


def test_an_owner_in_trouble_is_given_nothing() -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(16, where=not_ours)
        silent, has = c.owners(hashes, 0)
        c.place(hashes, range(16), has)
        asked_first(c, silent)
        c.peers[silent].silent = True
        c.fetch(hashes)
        assert c.me.has(hashes) == list(range(16))
        assert c.peers[silent].puts == []


def given(c: Cluster, test: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        await test()
        await c.settle()
        await c.repair.close()

    asyncio.run(go())


def blocks_of(hashes: list[BlockHash]) -> list[object]:
    return [address_of(hashes, index) for index in range(len(hashes))]


def test_the_same_block_is_offered_once() -> None:
    with cluster() as c:
        hashes = c.chain(16)
        c.place(hashes, range(16), "n0")

        async def test() -> None:
            for _ in range(5):
                c.repair.give(c.me.store, c.peers["n1"].node, blocks_of(hashes))  # type: ignore[arg-type]
            await c.settle()
            c.repair.give(c.me.store, c.peers["n1"].node, blocks_of(hashes))  # type: ignore[arg-type]

        given(c, test)
        assert sum(len(put) for put in c.peers["n1"].puts) == 16
        assert c.peers["n1"].lookups == 1


def test_more_than_fit_are_dropped_and_counted() -> None:
    with cluster() as c:
        hashes = c.chain(1100)

        async def test() -> None:
            c.repair.give(c.me.store, c.peers["n1"].node, blocks_of(hashes))  # type: ignore[arg-type]
            assert c.repair.counters()["cluster_read_repair_queue"] == 1024

        given(c, test)
        counters = c.repair.counters()
        assert counters["cluster_read_repair_dropped_total"] == 1100 - 1024
        assert counters["cluster_read_repair_refused_total"] == 1024, "they are not here any more"


def test_an_owner_that_went_down_is_not_waited_for() -> None:
    with cluster() as c:
        hashes = c.chain(16)
        c.place(hashes, range(16), "n0")
        c.peers["n1"].usable = False

        async def test() -> None:
            c.repair.give(c.me.store, c.peers["n1"].node, blocks_of(hashes))  # type: ignore[arg-type]
            c.repair.give(c.me.store, c.peers["n2"].node, blocks_of(hashes))  # type: ignore[arg-type]

        given(c, test)
        assert c.peers["n1"].puts == []
        assert c.nodes["n2"].has(hashes) == list(range(16))


def test_forgetting_a_store_drops_what_waits_for_it() -> None:
    with cluster() as c:
        hashes = c.chain(16)
        c.place(hashes, range(16), "n0")

        async def test() -> None:
            c.repair.give(c.me.store, c.peers["n1"].node, blocks_of(hashes))  # type: ignore[arg-type]
            began = time.monotonic()
            await c.repair.forget(c.me.store)
            assert time.monotonic() - began < 1

        given(c, test)
        assert c.peers["n1"].puts == []
