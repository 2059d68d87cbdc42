"""Nodes of a cluster as far as control goes: real gRPC on loopback, made-up stores and bulk channels."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.tickets import Tickets
from cachemgr.cluster.certificates import Certificates
from cachemgr.cluster.contract import Fetched
from cachemgr.cluster.control.client import ControlClient
from cachemgr.cluster.control.grpc_service import GrpcChannel, GrpcServer
from cachemgr.cluster.control.messages import NodeStatus
from cachemgr.cluster.control.peer import Bulk, ConnectedPeer, OpenDoor
from cachemgr.cluster.control.peers import ConnectedPeers
from cachemgr.cluster.control.server import ControlServer, Door
from cachemgr.cluster.rings import RingsInForce
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId, NodeSpec, RingFile, RingState, Version, first_state
from cachemgr.shard import BlockAddress
from tests.cachemgr.cluster.certificates import Authority
from tests.cachemgr.cluster.control.clock import TurnedClock
from tests.cachemgr.cluster.control.stores import DictStore
from tests.free_ports import free_ports

CLUSTER = "test"
HOST = b"one host"
LIMIT_S = 60.0


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on a loop of its own; AssertionError if it leaves a task or a thread of ours behind."""

    async def limited() -> None:
        await asyncio.wait_for(test(), LIMIT_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        grpc_own = {task for task in left if task.get_name().startswith(("rpc_task", "HandleExceptions"))}
        if grpc_own:  # of a call that was answered: they end a moment after it
            await asyncio.wait(grpc_own, timeout=5.0)
        left = {task for task in left if not task.done()}
        assert not left, left

    asyncio.run(limited())
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("cluster")] == []


def settings(**changes: Any) -> ClusterSettings:
    """Those of a node; deadlines that a slow machine keeps."""
    values = {
        "listen": "127.0.0.1:1",
        "members": (NodeSpec("a", "127.0.0.1:1"),),
        "call_s": 10.0,
        "lookup_s": 0.05,
        **changes,
    }
    return ClusterSettings(**values)


class DirectBulk:
    """A bulk channel of tickets only: opens a door for each call, redeems its ticket, copies addresses."""

    def __init__(self, node: NodeId, open_door: OpenDoor, *, me: NodeId, nodes: "dict[int, Node]") -> None:
        self.node = node
        self.open_door = open_door
        self.me = me
        self.nodes = nodes
        self.doors: list[BulkDoor] = []
        self.trouble: PeerTrouble | None = None
        self.closed = False

    async def get(self, store: Any, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        there = await self._come_in()
        here = [there.store.blocks.get(block.hash) for block in blocks]
        store.blocks.update({block.hash: block for block in here if block is not None})
        return Fetched(tuple(block is not None for block in here), nbytes=len(here))

    async def put(self, store: Any, blocks: Sequence[BlockHash], *, deadline: float) -> list[bool]:
        there = await self._come_in()
        there.store.blocks.update({name: store.blocks[name] for name in blocks})
        return [True] * len(blocks)

    async def close(self) -> None:
        self.closed = True

    async def _come_in(self) -> "Node":
        if self.trouble is not None:
            raise self.trouble
        door = await self.open_door()
        self.doors.append(door)
        there = self.nodes[door.port]
        if not there.tickets.redeem(door.ticket, self.me):
            raise PeerTrouble("refused", "the ticket is not valid")
        return there


class Node:
    """One node: `start` listens and looks after its peers."""

    def __init__(
        self, spec: NodeSpec, first: RingState, folder: Path, *, nodes: "dict[int, Node]", **options: Any
    ) -> None:
        self.id = NodeId(spec.id)
        self.spec = spec
        self.nodes = nodes
        self.port = int(spec.address.rpartition(":")[2])
        nodes[self.port] = self
        self.clock: TurnedClock | None = options.pop("clock", None)
        self.wires: tuple[int, int] = options.pop("wires", (1, 2))
        self.cluster: str = options.pop("cluster", CLUSTER)
        self.certificates: Certificates | None = options.pop("certificates", None)
        authority: Authority | None = options.pop("authority", None)
        if authority is not None:
            self.certificates = authority.certificates(self.id)
        self.settings = settings(**options)
        self.store = DictStore()
        self.stores: dict[bytes, Any] = {self.store.format_id: self.store}
        self.bulk_port = self.port
        self.tickets = Tickets()
        self.moved: list[tuple[NodeId, bytes, list[BlockHash]]] = []
        self.bulks: dict[NodeId, DirectBulk] = {}
        self.rings = RingsInForce(
            self.id, file=RingFile(folder / spec.id / "ring.json"), previous_s=600.0, given=first
        )
        loop = asyncio.get_running_loop()
        self.time = self.clock or loop.time
        self.peers = ConnectedPeers(
            rings=self.rings, make=self._make, settings=self.settings, clock=self.time
        )
        self.control = ControlServer(
            cluster=self.cluster,
            rings=self.rings,
            stores=self.stores,
            tickets=self.tickets,
            door=lambda: Door(self.bulk_port),
            publish=self._publish,
            moved=self._moved,
            status=lambda: NodeStatus(node=self.id, members=self.peers.status()),
            drained=self.peers.drained,
            heard=self.peers.heard,
            host=HOST,
            wires=self.wires,
        )
        self.server = GrpcServer(self.control.handlers(), certificates=self.certificates)

    async def start(self) -> "Node":
        await self.server.start(self.spec.address)
        return self

    async def stop(self, grace_s: float = 0.0) -> None:
        """Only the wire, as a process that ends."""
        await self.server.close(grace_s)

    async def close(self) -> None:
        await self.peers.close()
        await self.server.close(0.0)
        self.control.close()

    def to(self, other: "Node | str") -> ConnectedPeer:
        peer = self.peers.peer(NodeId(other if isinstance(other, str) else other.id))
        assert peer is not None
        return peer

    def within(self, seconds: float = 10.0) -> float:
        return self.time() + seconds

    def _make(self, node: NodeId, address: str) -> ConnectedPeer:
        control = ControlClient(
            node,
            address,
            cluster=self.cluster,
            rings=self.rings,
            connect=lambda to: GrpcChannel(to, certificates=self.certificates, node=node),
            call_s=self.settings.call_s,
            wires=self.wires,
            clock=self.time,
        )
        return ConnectedPeer(
            node,
            address,
            control=control,
            bulk=self._bulk,
            settings=self.settings,
            host=HOST,
            clock=self.time,
        )

    def _bulk(self, node: NodeId, open_door: OpenDoor) -> Bulk:
        self.bulks[node] = DirectBulk(node, open_door, me=self.id, nodes=self.nodes)
        return self.bulks[node]

    def _moved(self, node: NodeId, format_id: bytes, names: Sequence[BlockHash]) -> int:
        self.moved.append((node, format_id, list(names)))
        return len(names)

    async def _publish(self, state: RingState, replaces: Version) -> Version | None:
        self.rings.propose(state, replaces=replaces)
        return None


@asynccontextmanager
async def cluster(folder: Path, names: str = "ab", **options: Any) -> AsyncIterator[list[Node]]:
    """Started nodes of one ring, closed at the end. `options`: of `Node` and of settings, for all of them."""
    ports = free_ports(len(names))
    specs = [NodeSpec(name, f"127.0.0.1:{port}") for name, port in zip(names, ports, strict=True)]
    first = first_state(specs, replicas=1)
    known: dict[int, Node] = {}
    nodes = [await Node(spec, first, folder, nodes=known, **options).start() for spec in specs]
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.close()
