"""Two nodes and the bulk channel between them: real stores, real sockets, no control service."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cachemgr.cluster.bulk.client import BulkClient
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.server import BulkServer
from cachemgr.cluster.bulk.tickets import Tickets
from cachemgr.cluster.certificates import Certificates
from cachemgr.cluster.contract import Fetched, RingListener
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockFormat, BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, NodeSpec, Ring, RingState, first_state
from cachemgr.shard import BlockAddress, address_of
from tests.cachemgr.host import Host, payload_of
from tests.cachemgr.node import Node, open_node

LIMIT_S = 60.0
READER, OWNER = NodeId("reader"), NodeId("owner")
MEDIUM = BlockFormat(b"identity of test", "float32", layers=1, kv_heads=32, head_dim=64, block_tokens=4)
"""64 KiB."""
BIG = BlockFormat(b"identity of test", "float32", layers=8, kv_heads=32, head_dim=64, block_tokens=4)
"""512 KiB."""
HUGE = BlockFormat(b"identity of test", "float32", layers=40, kv_heads=32, head_dim=128, block_tokens=4)
"""5 MiB: more than one slice."""


class FixedRings:
    """Rings without a disk."""

    def __init__(self, node: NodeId, state: RingState | None = None) -> None:
        self.node = node
        specs = [NodeSpec(READER, "127.0.0.1:1"), NodeSpec(OWNER, "127.0.0.1:2")]
        self.ring = Ring(state or first_state(specs, replicas=1))
        self.previous: Ring | None = None
        self.earlier: tuple[Ring, ...] = ()
        self.installed: list[RingState] = []

    def install(self, state: RingState) -> bool:
        if state.version <= self.ring.version:
            return False
        self.ring = Ring(state)
        self.installed.append(state)
        return True

    def listen(self, listener: RingListener) -> None:
        raise AssertionError("nobody listens in these tests")


def settings(**changes: Any) -> ClusterSettings:
    values: dict[str, Any] = {
        "listen": "127.0.0.1:1",
        "members": (NodeSpec(OWNER, "127.0.0.1:2"),),
        "lookup_s": 10.0,
        "call_s": 10.0,
        "same_host": False,
    }
    return ClusterSettings(**(values | changes))


@dataclass
class Pair:
    """A reader that asks and an owner that serves."""

    reader: Node
    owner: Node
    server: BulkServer
    client: BulkClient
    tickets: Tickets
    reader_rings: FixedRings
    owner_rings: FixedRings
    port: int
    reads: list[tuple[BlockHash, int, int]]
    doors: list[BulkDoor]
    """All that were opened."""

    async def get(self, blocks: list[BlockAddress], *, seconds: float = 30.0) -> Fetched:
        return await self.client.get(self.reader.store, blocks, deadline=after(seconds))

    async def put(self, names: list[BlockHash], *, seconds: float = 30.0) -> list[bool]:
        return await self.client.put(self.reader.store, names, deadline=after(seconds))


@asynccontextmanager
async def pair(
    host: Host,
    *,
    blocks: int = 64,
    block_format: BlockFormat | None = None,
    server: dict[str, Any] | None = None,
    client: dict[str, Any] | None = None,
    door: Callable[[BulkDoor], BulkDoor] = lambda door: door,
    certificates: tuple[Certificates | None, Certificates | None] = (None, None),
    listen: str = "127.0.0.1",
    owner: Node | None = None,
    reader: Node | None = None,
    reader_rings: FixedRings | None = None,
    owner_rings: FixedRings | None = None,
    hot: dict[BlockHash, int] | None = None,
    versions: tuple[int, int] = (1, 2),
    server_versions: tuple[int, int] = (1, 2),
    pinned_nbytes: int = 256 << 20,
    **changes: Any,
) -> AsyncIterator[Pair]:
    """Open both, and afterwards see that nothing is left pinned, reserved, open or running."""
    options: dict[str, Any] = {"blocks": blocks}
    if block_format is not None:
        options["block_format"] = block_format
    reader = reader or open_node(host, "reader", **options)
    owner = owner or open_node(host, "owner", **options)
    tickets = Tickets()
    reader_rings, owner_rings = reader_rings or FixedRings(READER), owner_rings or FixedRings(OWNER)
    reads: list[tuple[BlockHash, int, int]] = []
    served = BulkServer(
        {owner.store.format_id: owner.store}.get, tickets=tickets, rings=owner_rings,
        settings=settings(**changes | (server or {})), certificates=certificates[0],
        on_read=lambda *read: reads.append(read), hot_of=lambda segment: (hot or {}).get(segment, 0),
        versions=server_versions, pinned_nbytes=pinned_nbytes,
    )  # fmt: skip
    port = await served.start(listen)
    doors: list[BulkDoor] = []

    async def open_channel() -> BulkDoor:
        made = BulkDoor(
            listen, port, tickets.issue(READER), same_host=changes.get("same_host", False), tls=served.tls
        )
        doors.append(door(made))
        return doors[-1]

    asking = BulkClient(
        OWNER, me=READER, open_channel=open_channel, rings=reader_rings,
        settings=settings(**changes | (client or {})), certificates=certificates[1], versions=versions,
    )  # fmt: skip
    try:
        yield Pair(
            reader, owner, served, asking, tickets, reader_rings, owner_rings, port, reads, doors
        )
    finally:
        await asking.close()
        await served.close()
    assert served.pinned_nbytes == 0
    assert len(served.leases) == 0
    assert_idle(reader, owner)


def assert_idle(*nodes: Node) -> None:
    """Nothing is pinned or reserved."""
    for node in nodes:
        assert node.cache.counters()["cache_pins"] == 0
        assert not node.cache._tier.table._state.index._reserved
        node.cache.check_integrity()


def addresses(names: list[BlockHash]) -> list[BlockAddress]:
    return [address_of(names, index) for index in range(len(names))]


def fill(node: Node, names: list[BlockHash], block_format: BlockFormat) -> None:
    """Commit every block."""
    for index in range(len(names)):
        pending = node.cache.prepare(names, index)
        assert pending is not None
        pending.payload[:] = payload_of(names[index], block_format)
        node.cache.commit(pending)


def whole(store: HostStore, names: list[BlockHash], block_format: BlockFormat) -> int:
    """How many are there; AssertionError if one has other bytes than its name says."""
    found = 0
    for shard in store.hold(names):
        if shard is not None:
            expected = payload_of(shard.address.hash, block_format).tobytes()
            assert bytes(shard.payload) == expected, "foreign bytes"
            found += 1
            store.let_go([shard])
    return found


def after(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on a loop of its own; AssertionError if a task is left."""

    async def limited() -> None:
        await asyncio.wait_for(test(), LIMIT_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    asyncio.run(limited())

