"""Nodes with real host tiers whose peers are method calls: they copy from store to store, slowly or never."""

import asyncio
import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from cachemgr import BlockHash, HostCache, open_cache
from cachemgr.cluster.background import Pace
from cachemgr.cluster.contract import Fetched, Peer, RingListener
from cachemgr.cluster.fetch.fetcher import Fetcher
from cachemgr.cluster.fetch.hot_keys import HotHints
from cachemgr.cluster.fetch.read_repair import ReadRepair
from cachemgr.cluster.moves.giver import Giver
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import RemoteTiers
from cachemgr.host_contract import HostStore
from cachemgr.remote import NoRemoteTiers
from cachemgr.ring import NodeId, NodeSpec, Ring, RingState, Version, first_state, position_of
from cachemgr.shard import SEGMENT_BLOCKS, BlockAddress, address_of
from tests.cachemgr import host
from tests.cachemgr.host import FORMAT, SECRETS

SETTINGS = ClusterSettings(lookup_s=0.05, call_s=1.0)


class Lag:
    """Measures how late the loop wakes at worst: what a busy machine adds to every deadline."""

    worst_s = 0.0

    async def __aenter__(self) -> "Lag":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            self.worst_s = max(self.worst_s, time.monotonic() - due)


class RingsDouble:
    def __init__(self, node: str, state: RingState) -> None:
        self.node = NodeId(node)
        self.ring = Ring(state)
        self.earlier: list[Ring] = []
        self.listeners: list[RingListener] = []

    def install(self, state: RingState) -> bool:
        self.earlier.insert(0, self.ring)
        self.ring = Ring(state)
        return True

    def listen(self, listener: RingListener) -> None:
        self.listeners.append(listener)


class PeerDouble:
    """Another node as one node sees it. What it is to do wrong is set by the test."""

    def __init__(self, node: NodeId, store: HostStore) -> None:
        self.node = node
        self.store = store
        self.usable = True
        self.down_since: float | None = None
        self.load = 0.0
        self.delay_s = 0.0
        self.silent = False
        self.deaf = False
        """Ignores its deadline, too."""
        self.raises = False
        self.gate: asyncio.Event | None = None
        self.midway: asyncio.Event | None = None
        """Holds each block when its slot is reserved."""
        self.trickle_s: float | None = None
        self.hot: dict[BlockHash, int] = {}
        self.gets: list[list[BlockHash]] = []
        self.puts: list[list[BlockHash]] = []
        self.lookups = 0
        self.served: Counter[BlockHash] = Counter()
        self.under_way = 0

    async def get(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        self.gets.append([block.hash for block in blocks])
        self.under_way += 1
        try:
            return await self._get(store, blocks, deadline)
        finally:
            self.under_way -= 1

    async def _get(self, store: HostStore, blocks: Sequence[BlockAddress], deadline: float) -> Fetched:
        if self.raises:
            raise RuntimeError("a peer never raises")
        if self.deaf:
            await asyncio.Event().wait()
        if self.silent:
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))
            return Fetched((False,) * len(blocks))
        if self.delay_s:
            await asyncio.sleep(min(self.delay_s, max(0.0, deadline - time.monotonic())))
        if self.gate is not None:
            await self.gate.wait()
        arrived = []
        for block in blocks:
            if self.trickle_s is not None:
                left = deadline - time.monotonic()
                await asyncio.sleep(max(0.0, min(self.trickle_s, left)))
            arrived.append(time.monotonic() < deadline and await copy(self.store, store, block, self.midway))
            self.served[block.hash] += arrived[-1]
        return Fetched(tuple(arrived), sum(arrived) * store.payload_nbytes, self.hot)

    async def put(self, store: HostStore, blocks: Sequence[BlockHash], *, deadline: float) -> list[bool]:
        self.puts.append(list(blocks))
        held = store.hold(blocks)
        store.let_go([shard for shard in held if shard is not None])
        return [shard is not None and await copy(store, self.store, shard.address) for shard in held]

    async def lookup(
        self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float
    ) -> list[BlockAddress | None]:
        self.lookups += 1
        held = self.store.hold(names)
        self.store.let_go([shard for shard in held if shard is not None])
        return [None if shard is None else shard.address for shard in held]

    async def list_arcs(
        self,
        format_id: bytes,
        low: npt.NDArray[np.uint64],
        high: npt.NDArray[np.uint64],
        *,
        after: bytes,
        deadline: float,
    ) -> tuple[list[BlockAddress], bytes] | None:
        return None

    async def moved(self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float) -> bool:
        return False

    async def exchange_ring(self, *, deadline: float) -> Version | None:
        return None


async def copy(
    source: HostStore, target: HostStore, block: BlockAddress, midway: asyncio.Event | None = None
) -> bool:
    """Is the block in `target` now?"""
    (shard,) = source.hold([block.hash])
    if shard is None:
        return False
    try:
        slot = target.reserve(block)
        if slot is None:
            return not target.missing([block.hash])
        if midway is not None:
            try:
                await midway.wait()
            except asyncio.CancelledError:
                target.abort(slot)
                raise
        slot.payload[:] = shard.payload
        target.publish(slot, shard.header)
        return True
    finally:
        source.let_go([shard])


class PeersDouble:
    def __init__(self, me: NodeId, peers: dict[NodeId, PeerDouble]) -> None:
        self.peers = {node: peer for node, peer in peers.items() if node != me}

    def peer(self, node: NodeId) -> Peer | None:
        return self.peers.get(node)

    def others(self) -> Sequence[Peer]:
        return list(self.peers.values())


class Node:
    """A host tier and its place on the ring."""

    def __init__(self, directory: Path, name: str, *, blocks: int) -> None:
        self.name = NodeId(name)
        (directory / name).mkdir()
        settings = host.Host(directory / name).settings(blocks=blocks)
        self.store: HostStore
        self.cache: HostCache = open_cache(FORMAT, settings, SECRETS, remote=self._keep)

    def _keep(self, store: HostStore) -> RemoteTiers:
        self.store = store
        return NoRemoteTiers()

    def has(self, hashes: Sequence[BlockHash]) -> list[int]:
        gone = set(self.store.missing(hashes))
        return [index for index in range(len(hashes)) if index not in gone]


class Cluster:
    """`nodes` of them; n0, with `room` for so many blocks, reads, the others are PeerDoubles to it."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 4,
        replicas: int = 1,
        blocks: int = 800,
        room: int | None = None,
        on_ring: int | None = None,
        seed: int = 0,
        settings: ClusterSettings = SETTINGS,
    ) -> None:
        self.nodes = {
            f"n{at}": Node(directory, f"n{at}", blocks=blocks if at or room is None else room)
            for at in range(nodes)
        }
        names = list(self.nodes)[: on_ring or nodes]
        state = first_state([NodeSpec(name, "127.0.0.1:7000") for name in names], replicas=replicas)
        self.me = self.nodes["n0"]
        self._seeds = itertools.count(1)
        self.rings = RingsDouble("n0", state)
        self.peers = {node.name: PeerDouble(node.name, node.store) for node in self.nodes.values()}
        self.seen = PeersDouble(self.me.name, self.peers)
        self.hints = HotHints(settings=settings, clock=time.monotonic)
        giver = Giver(Pace(1e9, clock=time.monotonic), call_s=settings.call_s, clock=time.monotonic)
        self.repair = ReadRepair(self.seen, giver, clock=time.monotonic)
        self.fetcher = Fetcher(
            self.rings,
            self.seen,
            hints=self.hints,
            repair=self.repair,
            settings=settings,
            clock=time.monotonic,
            random=Random(seed),
        )

    def chain(
        self,
        blocks: int,
        *,
        where: Callable[[list[tuple[NodeId, ...]]], bool] = lambda owners: True,
    ) -> list[BlockHash]:
        """A new prompt whose segments have owners as wished, other than all before."""
        for _ in range(20_000):
            hashes = host.chain(self.me.cache, blocks, seed=next(self._seeds))
            if where([self.owners(hashes, at) for at in range(0, blocks, SEGMENT_BLOCKS)]):
                return hashes
        raise AssertionError("no such prompt")

    def owners(self, hashes: Sequence[BlockHash], index: int) -> tuple[NodeId, ...]:
        ring = self.rings.ring
        return ring.owners(position_of(hashes[index - index % SEGMENT_BLOCKS]), 1 + ring.replicas)

    def place(self, hashes: Sequence[BlockHash], indices: Sequence[int], *nodes: str) -> None:
        """These blocks are on these nodes."""
        writer = self.nodes[nodes[0]]
        for index in indices:
            if writer.store.missing([hashes[index]]):
                assert host.write(writer.cache, hashes, index)
        for name in nodes[1:]:
            for index in indices:
                assert asyncio.run(copy(writer.store, self.nodes[name].store, address_of(hashes, index)))

    def place_all(self, hashes: Sequence[BlockHash], *, but: Sequence[int] = ()) -> None:
        """Every block is on all its owners but us."""
        for index in range(len(hashes)):
            nodes = [node for node in self.owners(hashes, index) if node != self.me.name]
            if index not in but and nodes:
                self.place(hashes, [index], *nodes)

    def fetch(self, hashes: Sequence[BlockHash], *, within: float = 5.0) -> None:
        """One fetch in a loop of its own, with all that it left in the background."""

        async def go() -> None:
            await self.fetcher.fetch(self.me.store, hashes, deadline=time.monotonic() + within)
            await self.settle()

        asyncio.run(go())

    async def settle(self) -> None:
        """Until nothing is under way in the background."""
        limit = time.monotonic() + 20
        while self.fetcher.counters()["cluster_segments_on_their_way"] or self.repairing:
            assert time.monotonic() < limit
            await asyncio.sleep(0.002)

    @property
    def repairing(self) -> bool:
        task = self.repair._task
        return task is not None and not task.done()

    @property
    def gets(self) -> list[list[BlockHash]]:
        """All requests to all peers."""
        return [asked for peer in self.peers.values() for asked in peer.gets]

    def close(self) -> None:
        for node in self.nodes.values():
            node.cache.close()


@contextmanager
def cluster(**options: object) -> Iterator[Cluster]:
    directory = Path(tempfile.mkdtemp(prefix="tensorcache-test-", dir="/dev/shm"))
    try:
        opened = Cluster(directory, **options)  # type: ignore[arg-type]
        try:
            yield opened
        finally:
            opened.close()
    finally:
        shutil.rmtree(directory)
