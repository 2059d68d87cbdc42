"""Control and the real bulk channel together: doors that open, drains and restarts under a stream of gets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cachemgr.cluster.bulk.client import BulkClient
from cachemgr.cluster.bulk.server import BulkServer
from cachemgr.cluster.control.peer import Bulk, OpenDoor
from cachemgr.ring import NodeId, NodeSpec, RingState, first_state
from tests.cachemgr.cluster.bulk.pair import addresses, fill, whole
from tests.cachemgr.cluster.control.nodes import Node, run
from tests.cachemgr.host import FORMAT, Host, chain
from tests.cachemgr.node import open_node
from tests.free_ports import free_ports


class RealNode(Node):
    """A node with a real host tier and a real bulk channel."""

    def __init__(self, spec: NodeSpec, first: RingState, folder: Path, *, host: Host, **options: Any) -> None:
        super().__init__(spec, first, folder, **options)
        self.tier = open_node(host, spec.id, blocks=64)
        self.stores.clear()
        self.stores[self.tier.store.format_id] = self.tier.store
        self.bulk = BulkServer(
            self.stores.get, tickets=self.tickets, rings=self.rings, settings=self.settings
        )

    async def start(self) -> "RealNode":
        self.bulk_port = await self.bulk.start("127.0.0.1")
        await super().start()
        return self

    async def leave(self) -> None:
        """As a node does that was asked to go."""
        self.control.drain()
        await self.peers.say_drain()
        await self.bulk.drain()
        await self.stop(grace_s=1.0)

    async def close(self) -> None:
        await super().close()
        await self.bulk.close()

    def _bulk(self, node: NodeId, open_door: OpenDoor) -> Bulk:
        return BulkClient(node, me=self.id, open_channel=open_door, rings=self.rings, settings=self.settings)


@asynccontextmanager
async def real_cluster(host: Host, folder: Path, **options: Any) -> AsyncIterator[list[RealNode]]:
    specs = [NodeSpec(name, f"127.0.0.1:{port}") for name, port in zip("ab", free_ports(2), strict=True)]
    first = first_state(specs, replicas=1)
    known: dict[int, Node] = {}
    options = {"lookup_s": 5.0, **options}
    nodes = [await RealNode(spec, first, folder, host=host, nodes=known, **options).start() for spec in specs]
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.close()


@pytest.mark.parametrize("same_host", [True, False])
def test_blocks_come_and_go_through_one_door(tmp_path: Path, host: Host, same_host: bool) -> None:
    async def test() -> None:
        async with real_cluster(host, tmp_path, same_host=same_host) as (a, b):
            names = chain(a.tier.cache, 8)
            fill(b.tier, names[:6], FORMAT)
            fetched = await a.to(b).get(a.tier.store, addresses(names), deadline=a.within())
            assert fetched.arrived == (True,) * 6 + (False,) * 2
            assert whole(a.tier.store, names, FORMAT) == 6
            found = await a.to(b).lookup(a.tier.store.format_id, names, deadline=a.within())
            assert found == [*addresses(names)[:6], None, None]
            other = chain(a.tier.cache, 4, seed=1)
            fill(a.tier, other, FORMAT)
            assert await a.to(b).put(a.tier.store, other, deadline=a.within()) == [True] * 4
            assert whole(b.tier.store, other, FORMAT) == 4
            assert b.control.calls["Open"] == 1
            assert not a.to(b).troubles

    run(test)


def test_a_node_leaves_under_a_stream_of_gets(tmp_path: Path, host: Host) -> None:
    async def test() -> None:
        async with real_cluster(host, tmp_path, same_host=False) as (a, b):
            names = chain(a.tier.cache, 16)
            fill(b.tier, names, FORMAT)
            asked = [0] * 4

            async def stream(which: int) -> bool:
                missed = False
                while a.to(b).usable:
                    a.tier.store.drop(names)
                    part = addresses(names)[4 * which : 4 * which + 4]
                    fetched = await a.to(b).get(a.tier.store, part, deadline=a.within())
                    missed |= not all(fetched.arrived)
                    asked[which] += 1
                return missed

            streams = [asyncio.create_task(stream(which)) for which in range(4)]
            while min(asked) < 5:
                await asyncio.sleep(0.005)
            await asyncio.wait_for(b.leave(), 20)
            assert await asyncio.gather(*streams) == [False] * 4
            assert not a.to(b).troubles

    run(test)


def test_a_node_that_was_killed_and_came_back_is_read_again(tmp_path: Path, host: Host) -> None:
    async def test() -> None:
        async with real_cluster(host, tmp_path, same_host=False, breaker_s=0.05) as (a, b):
            a.peers.start()
            names = chain(a.tier.cache, 4)
            fill(b.tier, names, FORMAT)
            get = a.to(b).get
            assert all((await get(a.tier.store, addresses(names), deadline=a.within())).arrived)
            await b.stop()
            await b.bulk.close()
            a.tier.store.drop(names)
            assert not any((await get(a.tier.store, addresses(names), deadline=a.within())).arrived)
            async with asyncio.timeout(20):
                while a.to(b).usable:
                    await asyncio.sleep(0.005)
            await b.start()
            async with asyncio.timeout(20):
                while not a.to(b).usable:
                    await asyncio.sleep(0.005)
            assert all((await get(a.tier.store, addresses(names), deadline=a.within())).arrived)

    run(test)
