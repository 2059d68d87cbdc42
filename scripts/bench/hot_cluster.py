"""Nodes for the row of hot keys: host tier, bulk server, hot keys; all in one process and on one loop."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachemgr import BlockFormat, BlockHash, CacheSecrets, CacheSettings, HostCache, open_cache
from cachemgr.cluster.background import Pace
from cachemgr.cluster.bulk.client import BulkClient
from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.server import BulkServer
from cachemgr.cluster.bulk.tickets import Tickets
from cachemgr.cluster.contract import Fetched, Peer, RingListener
from cachemgr.cluster.fetch.hot_keys import HotKeys
from cachemgr.cluster.fetch.hot_spread import HotSpread
from cachemgr.cluster.moves.giver import Giver
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.host_contract import HostStore
from cachemgr.remote import NoRemoteTiers
from cachemgr.ring import NodeId, NodeSpec, Ring, RingState, Version, first_state, position_of
from cachemgr.shard import BlockAddress, slot_nbytes

PATIENT_S = 5.0
"""Nothing is down here; a busy machine is no reason to ask somebody else."""
_LAYOUT = BlockFormat(b"identity of hot ", "float32", layers=1, kv_heads=1, head_dim=4, block_tokens=32)
_ROOM = 4096
"""Blocks that a node has room for."""


class FixedRing:
    """One node's view of a ring that never changes."""

    previous: Ring | None = None
    earlier: tuple[Ring, ...] = ()

    def __init__(self, node: NodeId, ring: Ring) -> None:
        self.node = node
        self.ring = ring

    def install(self, state: RingState) -> bool:
        """Never: all have the same."""
        return False

    def listen(self, listener: RingListener) -> None:
        """Nothing will happen."""


class BulkPeer:
    """A `Peer` with a bulk channel and no control service: `lookup` asks the store, which is right here."""

    usable = True
    down_since: float | None = None

    def __init__(self, node: "BenchNode", rings: FixedRing, settings: ClusterSettings) -> None:
        self.node = node.name
        self._store = node.store
        self._seconds = 0.0
        self._running = 0

        async def door() -> BulkDoor:
            ticket = node.tickets.issue(rings.node)
            return BulkDoor("127.0.0.1", node.port, ticket, same_host=False, tls=False)

        self._bulk = BulkClient(self.node, me=rings.node, open_channel=door, rings=rings, settings=settings)

    @property
    def load(self) -> float:
        """As a real one: latency seen, halved by each request of ours, times requests."""
        return self._seconds * (1 + self._running)

    async def get(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        """Trouble is a miss."""
        self._running += 1
        began = time.monotonic()
        try:
            return await self._bulk.get(store, blocks, deadline=deadline)
        except PeerTrouble:
            return Fetched((False,) * len(blocks))
        finally:
            self._running -= 1
            self._seconds += 0.5 * (time.monotonic() - began - self._seconds)

    async def put(self, store: HostStore, blocks: Sequence[BlockHash], *, deadline: float) -> list[bool]:
        """Trouble is nothing taken."""
        try:
            return await self._bulk.put(store, blocks, deadline=deadline)
        except PeerTrouble:
            return [False] * len(blocks)

    async def lookup(
        self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float
    ) -> list[BlockAddress | None]:
        """What it has."""
        held = self._store.hold(names)
        self._store.let_go([shard for shard in held if shard is not None])
        return [None if shard is None else shard.address for shard in held]

    async def list_arcs(
        self, format_id: bytes, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64], *,
        after: bytes, deadline: float,
    ) -> tuple[list[BlockAddress], bytes] | None:  # fmt: skip
        """Not here."""
        return None

    async def moved(self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float) -> bool:
        """Not here."""
        return False

    async def exchange_ring(self, *, deadline: float) -> Version | None:
        """Not here."""
        return None

    async def close(self) -> None:
        """Let go of the socket."""
        await self._bulk.close()


class FixedPeers:
    """All other nodes."""

    def __init__(self, peers: Mapping[NodeId, BulkPeer]) -> None:
        self._peers = peers

    def peer(self, node: NodeId) -> Peer | None:
        """As `Peers`."""
        return self._peers.get(node)

    def others(self) -> Sequence[Peer]:
        """As `Peers`."""
        return list(self._peers.values())


class BenchNode:
    """A cache node: a host tier, its bulk server, its hot keys."""

    hot_keys: HotKeys

    def __init__(self, name: NodeId, cache: HostCache, store: HostStore) -> None:
        self.name = name
        self.cache = cache
        self.store = store
        self.tickets = Tickets()
        self.port = 0


class BenchCluster:
    """The nodes, and who served how many reads."""

    def __init__(
        self, folder: Path, secrets: CacheSecrets, settings: ClusterSettings, *, nodes: int
    ) -> None:
        self._folder = folder
        self._secrets = secrets
        self.settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self.names = [NodeId(f"cache-{number}") for number in range(nodes)]
        self.ring = Ring(first_state([NodeSpec(name, "127.0.0.1:1") for name in self.names], replicas=0))
        self.nodes: dict[NodeId, BenchNode] = {}
        self.served: Counter[NodeId] = Counter()

    def store(self, stack: ExitStack, name: str, *, blocks: int) -> tuple[HostCache, HostStore]:
        """A host tier with room for so many blocks; its files lie in the bench's folder."""
        stores: list[HostStore] = []

        def keep(store: HostStore) -> NoRemoteTiers:
            stores.append(store)
            return NoRemoteTiers()

        directory = self._folder / name
        directory.mkdir()
        nbytes = blocks * slot_nbytes(_LAYOUT.payload_nbytes)
        cache_settings = CacheSettings(cluster="bench", host_bytes=nbytes, directory=str(directory))
        cache = open_cache(_LAYOUT, cache_settings, self._secrets, remote=keep)
        stack.callback(cache.close)
        return cache, stores[0]

    async def start(self, stack: AsyncExitStack, node: BenchNode) -> None:
        """Its server listens, and counts what it serves."""
        rings = FixedRing(node.name, self.ring)
        peers = await stack.enter_async_context(self.peers(rings))
        giver = Giver(Pace(1e9, clock=time.monotonic), call_s=PATIENT_S, clock=time.monotonic)
        node.hot_keys = HotKeys(
            rings, HotSpread(lambda: [node.store], peers, giver),
            spawn=self._spawn, settings=self.settings, clock=time.monotonic,
        )  # fmt: skip

        def on_read(segment: BlockHash, blocks: int, nbytes: int) -> None:
            self.served[node.name] += 1
            node.hot_keys.observe(segment)

        server = BulkServer(
            {node.store.format_id: node.store}.get, tickets=node.tickets, rings=rings,
            settings=self.settings, on_read=on_read, hot_of=node.hot_keys.extra,
        )  # fmt: skip
        node.port = await server.start("127.0.0.1")
        stack.push_async_callback(server.close)

    @contextlib.asynccontextmanager
    async def peers(self, rings: FixedRing) -> AsyncIterator[FixedPeers]:
        """The nodes as `rings.node` sees them. They connect when they are first used."""
        others = {
            name: BulkPeer(node, rings, self.settings)
            for name, node in self.nodes.items()
            if name != rings.node
        }
        try:
            yield FixedPeers(others)
        finally:
            for peer in others.values():
                await peer.close()

    def prompts(self, count: int, *, blocks: int) -> list[list[BlockHash]]:
        """So many prompts of one segment, each on its primary. The first one will be the hot one."""
        found = []
        some = next(iter(self.nodes.values())).cache
        for number in range(count):
            tokens = np.arange(blocks * _LAYOUT.block_tokens) + 10_000 * number
            hashes = some.hashes(tokens, namespace="bench")
            (primary,) = self.ring.owners(position_of(hashes[0]), 1)
            cache = self.nodes[primary].cache
            for index in range(blocks):
                pending = cache.prepare(hashes, index)
                if pending is None:
                    raise RuntimeError(f"no room for prompt {number}")
                pending.payload[:] = number % 251
                cache.commit(pending)
            found.append(hashes)
        return found

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.asynccontextmanager
async def opened_cluster(
    folder: Path, secrets: CacheSecrets, settings: ClusterSettings, *, nodes: int
) -> AsyncIterator[BenchCluster]:
    """So many nodes that serve; their files lie in `folder`."""
    cluster = BenchCluster(folder, secrets, settings, nodes=nodes)
    async with AsyncExitStack() as stack:
        with ExitStack() as caches:
            for name in cluster.names:
                cluster.nodes[name] = BenchNode(name, *cluster.store(caches, name, blocks=_ROOM))
            async with stack:
                for node in cluster.nodes.values():
                    await cluster.start(stack, node)
                yield cluster
