"""Nodes with real rings on disk, whose peers are method calls that can be cut."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from cachemgr.cluster.contract import Membership
from cachemgr.cluster.members.redis_members import Pace, RedisMembers
from cachemgr.cluster.members.redis_ring_store import RedisRingStore
from cachemgr.cluster.members.static_members import StaticMembers
from cachemgr.cluster.rings import RingsInForce
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client import RedisClient
from cachemgr.ring import NodeId, NodeSpec, RingFile, RingState, Version

LIMIT_S = 20.0
"""Far longer than anything takes."""

QUICK = Pace(start_s=8.0, look_s=0.05, first_retry_s=0.05, longest_retry_s=0.2)


def spec(name: str, port: int = 7000, **fields: object) -> NodeSpec:
    return NodeSpec(name, f"127.0.0.1:{port}", **fields)  # type: ignore[arg-type]


async def eventually(condition: Callable[[], object], *, limit_s: float = LIMIT_S) -> None:
    """For what happens in other tasks and has no event to wait for."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not become true within {limit_s:g} s"
        await asyncio.sleep(0.005)


class Node:
    """One node: its rings, its membership, and whether others reach it."""

    def __init__(self, me: NodeSpec, network: "Network") -> None:
        self.me = me
        self.reachable = True
        self.rings = RingsInForce(
            NodeId(me.id), file=RingFile(network.folder / me.id / "ring.json"), previous_s=600.0
        )
        self.network = network
        self.exchanges = 0
        self.members: Membership

    @property
    def state(self) -> RingState:
        return self.rings.ring.state

    @property
    def version(self) -> Version:
        return self.rings.ring.version

    @property
    def names(self) -> list[str]:
        return [node.id for node in self.state.nodes]

    def peer(self, node: NodeId) -> "PeerDouble | None":
        rings = (self.rings.ring, self.rings.previous)
        known = {one.id for ring in rings if ring is not None for one in ring.state.nodes}
        return PeerDouble(self, node) if node in known and node != self.me.id else None

    def others(self) -> Sequence["PeerDouble"]:
        return [PeerDouble(self, NodeId(one)) for one in self.names if one != self.me.id]

    async def start(self) -> "Node":
        await self.members.start(self.rings, self)  # type: ignore[arg-type]  # peers are no more than this here
        return self


class PeerDouble:
    """Another node as `asker` reaches it."""

    def __init__(self, asker: Node, node: NodeId) -> None:
        self.node = node
        self._asker = asker

    @property
    def down_since(self) -> float | None:
        return None if self._found() else 1.0

    def _found(self) -> Node | None:
        there = self._asker.network.nodes.get(self.node)
        return there if there and there.reachable and self._asker.reachable else None

    async def exchange_ring(self, *, deadline: float) -> Version | None:
        self._asker.exchanges += 1
        await asyncio.sleep(0)
        there = self._found()
        if there is None:
            return None
        there.rings.install(self._asker.state)
        answer = there.state
        await asyncio.sleep(0)
        self._asker.rings.install(answer)
        return there.version


class Network:
    """Makes nodes that share a folder, a static list or a Redis."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}

    def static(self, me: NodeSpec, members: Sequence[NodeSpec], *, gossip_s: float = 600.0) -> Node:
        node = self._node(me)
        node.members = StaticMembers(me, members, replicas=1, gossip_s=gossip_s, random=Random(1))
        return node

    def redis(
        self, me: NodeSpec, url: str, *, timeout_s: float = 5.0, alive_s: float = 5.0, pace: Pace = QUICK
    ) -> Node:
        node = self._node(me)
        client = RedisClient(RedisAddress.parse(url), timeout_s=timeout_s)
        store = RedisRingStore(client, cluster="test", alive_s=alive_s)
        node.members = RedisMembers(me, store, replicas=1, random=Random(me.id), pace=pace)
        return node

    def _node(self, me: NodeSpec) -> Node:
        self.nodes[me.id] = node = Node(me, self)
        return node

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.members.close()

    async def __aenter__(self) -> "Network":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
