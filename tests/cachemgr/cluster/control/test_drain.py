"""A node that leaves is not asked any more, and no call fails for it, to its last moment."""

import asyncio
from pathlib import Path

from cachemgr.cluster.control.messages import DRAIN, DrainRequest
from cachemgr.ring import NodeId
from tests.cachemgr.cluster.control.nodes import Node, cluster, run
from tests.cachemgr.cluster.control.stores import FORMAT, chain

BLOCKS = chain("x", 4)
NAMES = [block.hash for block in BLOCKS]


class Stream:
    """Gets, one after the other, from a peer for as long as it may be asked."""

    def __init__(self, a: Node, b: Node) -> None:
        self.a, self.b = a, b
        self.asked = 0
        self.missed = 0

    async def run(self) -> None:
        peer = self.a.to(self.b)
        while peer.usable:
            self.a.store.blocks.clear()
            fetched = await peer.get(self.a.store, BLOCKS, deadline=self.a.within())  # type: ignore[arg-type]
            found = await peer.lookup(FORMAT, NAMES, deadline=self.a.within())
            self.asked += 2
            self.missed += not all(fetched.arrived)
            self.missed += found != BLOCKS
            await asyncio.sleep(0)


def test_a_stream_of_gets_stops_without_a_failed_call(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "abc") as (a, b, c):
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            streams = [Stream(node, b) for node in (a, c) for _ in range(3)]
            running = [asyncio.create_task(stream.run()) for stream in streams]
            while min(stream.asked for stream in streams) < 10:
                await asyncio.sleep(0.005)
            b.control.drain()
            await b.peers.say_drain()
            await asyncio.wait_for(asyncio.gather(*running), 20)
            await b.stop(grace_s=5.0)
            assert sum(stream.missed for stream in streams) == 0
            assert not a.to(b).troubles
            assert a.to(b).status.state == "draining"
            assert a.to(b).down_since is None

    run(test)


def test_who_missed_the_word_hears_it_with_the_next_answer(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            b.control.drain()
            assert a.to(b).usable
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
            assert not a.to(b).usable

    run(test)


def test_a_draining_node_answers_whoever_asks_it_still(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            b.control.drain()
            await b.peers.say_drain()
            assert not a.to(b).usable
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
            fetched = await a.to(b).get(a.store, BLOCKS, deadline=a.within())  # type: ignore[arg-type]
            assert all(fetched.arrived)
            assert not a.to(b).usable

    run(test)


def test_a_node_that_drained_and_came_back_is_used_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab", breaker_s=0.05) as (a, b):
            a.peers.start()
            b.control.drain()
            await b.peers.say_drain()
            await asyncio.sleep(0.2)  # probes find it draining still
            assert not a.to(b).usable
            await b.close()
            back = await Node(b.spec, b.rings.ring.state, tmp_path, nodes=b.nodes).start()
            async with asyncio.timeout(20):
                while not a.to(b).usable:
                    await asyncio.sleep(0.005)
            await back.close()

    run(test)


def test_nodes_that_are_gone_do_not_hold_up_the_one_that_leaves(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "abc") as (a, b, c):
            await b.stop()
            a.control.drain()
            await asyncio.wait_for(a.peers.say_drain(), 5)
            assert not c.to(a).usable
            assert b.to(a).usable

    run(test)


def test_strangers_drain_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            a.peers.drained(NodeId("nobody"))
            assert a.to(b).usable
            assert DRAIN.decode_request(b"\x80") == DrainRequest()

    run(test)
