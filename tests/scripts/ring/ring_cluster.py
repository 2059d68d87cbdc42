"""Three small nodes without engines: real control servers on loopback, real membership, made-up stores."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from cachemgr.cluster.control.messages import FormatStatus, NodeStatus
from cachemgr.cluster.members.static_members import StaticMembers
from cachemgr.ring import NodeSpec, RingState, Version, first_state
from cachemgr.shard import BlockAddress
from tests.cachemgr.cluster.control.nodes import CLUSTER, Node
from tests.free_ports import free_ports

__all__ = ["CLUSTER", "Member", "RingCluster", "ring_cluster"]

T = TypeVar("T")
PAYLOAD_NBYTES = 1 << 20


class Member(Node):
    """A node of a static list; gossips never, so that nothing changes behind a test's back."""

    def __init__(self, spec: NodeSpec, first: RingState, folder: Path, **options: Any) -> None:
        super().__init__(spec, first, folder, **options)
        self.members = StaticMembers(
            spec, first.nodes, replicas=first.replicas, call_s=2.0, gossip_s=600.0, random=Random(1)
        )
        self.delay: asyncio.Event | None = None
        self.asked = threading.Event()
        self.trouble: list[str] = []
        self.pulled = True
        self.control._status = self._told

    async def end(self) -> None:
        await self.members.close()
        await self.close()

    def _told(self) -> NodeStatus:
        blocks = len(self.store.blocks)
        return NodeStatus(
            node=self.id,
            address=self.spec.address,
            blocks=blocks,
            nbytes=blocks * PAYLOAD_NBYTES,
            pulled=self.pulled,
            members=self.peers.status(),
            formats=[FormatStatus(format_id=self.store.format_id, blocks=blocks)],
            trouble=[line for line in (*self.trouble, self.members.trouble) if line],
        )

    async def _publish(self, state: RingState, replaces: Version) -> Version | None:
        if self.delay is not None:
            self.asked.set()
            await self.delay.wait()
        return await self.members.publish(state, replaces=replaces)


class RingCluster:
    """What tests do with the nodes, from a thread that has no loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, nodes: list[Member]) -> None:
        self.loop = loop
        self.nodes = nodes

    @property
    def at(self) -> tuple[str, ...]:
        """Options that name the first node."""
        return self.via(0)

    def via(self, index: int) -> tuple[str, ...]:
        return ("--at", self.nodes[index].spec.address, "--cluster", CLUSTER)

    def do(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run something on the nodes' loop."""
        return asyncio.run_coroutine_threadsafe(_awaited(work), self.loop).result(30.0)

    def stop(self, index: int) -> None:
        self.do(self.nodes[index].stop)

    def give(self, index: int, *addresses: BlockAddress) -> None:
        """Blocks that this node has."""
        for address in addresses:
            self.nodes[index].store.blocks[address.hash] = address

    def versions(self) -> set[Version]:
        return {node.rings.version for node in self.nodes}


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


@contextmanager
def ring_cluster(
    folder: Path, *, names: str = "abc", domains: tuple[str, ...] = ("", "", "")
) -> Iterator[RingCluster]:
    """Nodes of one ring with one replica, on a loop in a thread of their own."""
    ports = free_ports(len(names))
    specs = [
        NodeSpec(f"node-{name}", f"127.0.0.1:{port}", domain)
        for name, port, domain in zip(names, ports, domains, strict=True)
    ]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="ring-cluster")
    thread.start()
    known: dict[int, Node] = {}

    async def make() -> list[Member]:
        first = first_state(specs, replicas=1)
        nodes = [Member(spec, first, folder, nodes=known, call_s=1.0, breaker_s=60.0) for spec in specs]
        for node in nodes:
            await node.start()
        for node in nodes:
            await node.members.start(node.rings, node.peers)
        return nodes

    cluster = RingCluster(loop, [])
    try:
        cluster.nodes = cluster.do(make)
        yield cluster
    finally:
        for node in cluster.nodes:
            cluster.do(node.end)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
