"""The row of hot keys: how evenly nodes serve when one prompt takes most of the reads.

Eight nodes in one process, each with a host tier, a bulk server and hot keys of its own; eight readers that
are none of them, so that nothing is read where it lies, and that keep nothing of what they read. Everything
that is served travels over the real bulk channel (TCP on loopback); only the control service is left out:
tickets are handed over directly. Prompts are of two small blocks: who serves is measured, not how many bytes.

The same readers read without hot keys first. The threshold is scaled to what this machine served then: an
eighth of the hot prompt's reads.
"""

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from cachemgr import BlockFormat, BlockHash, CacheSecrets, CacheSettings, HostCache, open_cache
from cachemgr.cluster.background import Pace
from cachemgr.cluster.bulk_client import BulkClient
from cachemgr.cluster.bulk_server import BulkServer
from cachemgr.cluster.contract import Fetched, HostStore, Peer, RingListener
from cachemgr.cluster.fetcher import Fetcher
from cachemgr.cluster.frames import PeerTrouble
from cachemgr.cluster.giver import Giver
from cachemgr.cluster.hot_keys import HotHints, HotKeys
from cachemgr.cluster.hot_spread import HotSpread
from cachemgr.cluster.opening import BulkDoor
from cachemgr.cluster.read_repair import ReadRepair
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.cluster.tickets import Tickets
from cachemgr.remote import NoRemoteTiers
from cachemgr.ring import NodeId, NodeSpec, Ring, RingState, Version, first_state, position_of
from cachemgr.shard import BlockAddress, slot_nbytes
from scripts.bench.harness import Measurement, Reading

ROW = "hot.max_over_mean"
_NODES = 8
_READERS = 8
_OTHERS = 400
"""Segments that share the rest of the reads."""
_HOT_SHARE = 0.8
_BLOCKS = 2
_SECONDS = 6.0
_WARM_UP_S = 4.0
_WINDOW_S = 2.0
_NEVER = 86_400.0
_LAYOUT = BlockFormat(b"identity of hot ", "float32", layers=1, kv_heads=1, head_dim=4, block_tokens=32)
_PATIENT_S = 5.0
"""Nothing is down here; a busy machine is no reason to ask somebody else."""


def measurements() -> list[Measurement]:
    """All measurements of hot keys."""
    return [Measurement((ROW,), _hot)]


def _hot() -> Iterator[Reading]:
    with tempfile.TemporaryDirectory() as folder:
        yield asyncio.run(_measured(Path(folder)))


async def _measured(folder: Path) -> Reading:
    secrets = CacheSecrets.generate(folder / "secrets")
    without = await _served(folder / "without", secrets, threshold=_NEVER)
    threshold = _HOT_SHARE * without.per_second / _NODES
    with_hot = await _served(folder / "with", secrets, threshold=threshold)
    detail = (
        f"{with_hot.ratio:.2f} with hot keys ({with_hot.counts}; {with_hot.early:.2f} in the first "
        f"{_WARM_UP_S:g} s), {without.ratio:.2f} without ({without.counts}); {_NODES} nodes and {_READERS} "
        f"readers in one process over the bulk channel, {with_hot.per_second:.0f} and "
        f"{without.per_second:.0f} reads/s, hot above {threshold:.0f}/s, k = {with_hot.extra}, "
        f"{with_hot.missed + without.missed} misses"
    )
    if without.ratio <= 5:
        raise RuntimeError(f"without hot keys max/mean must exceed 5: {detail}")
    return Reading(ROW, with_hot.ratio, detail)


class _Result:
    """What the nodes served in one run."""

    def __init__(self, early: Counter[NodeId], served: Counter[NodeId], seconds: float) -> None:
        self.early = _max_over_mean(early)
        self.ratio = _max_over_mean(served)
        self.counts = "/".join(str(served[node]) for node in _names())
        self.per_second = served.total() / seconds
        self.extra = 0
        self.missed = 0


def _max_over_mean(served: Counter[NodeId]) -> float:
    counts = [served[node] for node in _names()]
    return max(counts) / statistics.mean(counts)


def _names() -> list[NodeId]:
    return [NodeId(f"cache-{number}") for number in range(_NODES)]


async def _served(folder: Path, secrets: CacheSecrets, *, threshold: float) -> _Result:
    """Read for a while, then count for a while."""
    folder.mkdir()
    settings = ClusterSettings(
        replicas=0, local_copies=False, same_host=False, lookup_s=_PATIENT_S, call_s=_PATIENT_S,
        hot_reads_per_s=threshold, hot_window_s=_WINDOW_S,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(_cluster(folder, secrets, settings))
        chains = cluster.prompts(1 + _OTHERS)
        readers = [await stack.enter_async_context(cluster.reader(at)) for at in range(_READERS)]
        ends = time.monotonic() + _WARM_UP_S + _SECONDS
        reading = [asyncio.create_task(reader.read_until(ends, chains)) for reader in readers]
        await asyncio.sleep(_WARM_UP_S)
        early = cluster.served.copy()
        await asyncio.gather(*reading)
        result = _Result(early, cluster.served - early, _SECONDS)
        result.extra = max(node.hot_keys.extra(chains[0][0]) for node in cluster.nodes.values())
        result.missed = sum(reader.missed for reader in readers)
        return result


class _FixedRing:
    """One node's view of a ring that never changes."""

    previous: Ring | None = None

    def __init__(self, node: NodeId, ring: Ring) -> None:
        self.node = node
        self.ring = ring

    def install(self, state: RingState) -> bool:
        """Never: all have the same."""
        return False

    def listen(self, listener: RingListener) -> None:
        """Nothing will happen."""


class _BulkPeer:
    """A `Peer` with a bulk channel and no control service: `lookup` asks the store, which is right here."""

    usable = True
    down_since: float | None = None

    def __init__(self, node: "_Node", rings: _FixedRing, settings: ClusterSettings) -> None:
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


class _Peers:
    """All other nodes."""

    def __init__(self, peers: Mapping[NodeId, _BulkPeer]) -> None:
        self._peers = peers

    def peer(self, node: NodeId) -> Peer | None:
        """As `Peers`."""
        return self._peers.get(node)

    def others(self) -> Sequence[Peer]:
        """As `Peers`."""
        return list(self._peers.values())


class _Node:
    """A cache node: a host tier, its bulk server, its hot keys."""

    hot_keys: HotKeys

    def __init__(self, name: NodeId, cache: HostCache, store: HostStore) -> None:
        self.name = name
        self.cache = cache
        self.store = store
        self.tickets = Tickets()
        self.port = 0


class _Cluster:
    """The nodes, and who served how many reads."""

    def __init__(self, folder: Path, secrets: CacheSecrets, settings: ClusterSettings) -> None:
        self._folder = folder
        self._secrets = secrets
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        specs = [NodeSpec(name, "127.0.0.1:1") for name in _names()]
        self.ring = Ring(first_state(specs, replicas=0))
        self.nodes: dict[NodeId, _Node] = {}
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

    async def start(self, stack: AsyncExitStack, node: _Node) -> None:
        """Its server listens, and counts what it serves."""
        rings = _FixedRing(node.name, self.ring)
        peers = await stack.enter_async_context(self.peers(rings))
        giver = Giver(Pace(1e9, clock=time.monotonic), call_s=_PATIENT_S, clock=time.monotonic)
        node.hot_keys = HotKeys(
            rings, HotSpread(lambda: [node.store], peers, giver),
            spawn=self._spawn, settings=self._settings, clock=time.monotonic,
        )  # fmt: skip

        def on_read(segment: BlockHash, blocks: int, nbytes: int) -> None:
            self.served[node.name] += 1
            node.hot_keys.observe(segment)

        server = BulkServer(
            {node.store.format_id: node.store}.get, tickets=node.tickets, rings=rings,
            settings=self._settings, on_read=on_read, hot_of=node.hot_keys.extra,
        )  # fmt: skip
        node.port = await server.start("127.0.0.1")
        stack.push_async_callback(server.close)

    @contextlib.asynccontextmanager
    async def peers(self, rings: _FixedRing) -> AsyncIterator[_Peers]:
        """The nodes as `rings.node` sees them. They connect when they are first used."""
        others = {
            name: _BulkPeer(node, rings, self._settings)
            for name, node in self.nodes.items()
            if name != rings.node
        }
        yield _Peers(others)
        for peer in others.values():
            await peer.close()

    def prompts(self, count: int) -> list[list[BlockHash]]:
        """So many prompts of one segment, each on its primary. The first one will be the hot one."""
        found = []
        some = next(iter(self.nodes.values())).cache
        for number in range(count):
            tokens = np.arange(_BLOCKS * _LAYOUT.block_tokens) + 10_000 * number
            hashes = some.hashes(tokens, namespace="bench")
            (primary,) = self.ring.owners(position_of(hashes[0]), 1)
            cache = self.nodes[primary].cache
            for index in range(_BLOCKS):
                pending = cache.prepare(hashes, index)
                if pending is None:
                    raise RuntimeError(f"no room for prompt {number}")
                pending.payload[:] = number % 251
                cache.commit(pending)
            found.append(hashes)
        return found

    @contextlib.asynccontextmanager
    async def reader(self, number: int) -> AsyncIterator["_Reader"]:
        """One that is on no ring."""
        rings = _FixedRing(NodeId(f"reader-{number}"), self.ring)
        with ExitStack() as stack:
            _, store = self.store(stack, rings.node, blocks=4 * _BLOCKS)
            async with self.peers(rings) as peers:
                hints = HotHints(settings=self._settings, clock=time.monotonic)
                giver = Giver(Pace(1e9, clock=time.monotonic), call_s=_PATIENT_S, clock=time.monotonic)
                repair = ReadRepair(peers, giver, clock=time.monotonic)
                fetcher = Fetcher(
                    rings, peers, hints=hints, repair=repair, settings=self._settings,
                    clock=time.monotonic, random=Random(number),
                )  # fmt: skip
                yield _Reader(store, fetcher, Random(1000 + number))
                await fetcher.close()
                await repair.close()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Reader:
    """Reads one prompt after the other, and keeps none."""

    def __init__(self, store: HostStore, fetcher: Fetcher, random: Random) -> None:
        self._store = store
        self._fetcher = fetcher
        self._random = random
        self.missed = 0

    async def read_until(self, ends: float, chains: Sequence[list[BlockHash]]) -> None:
        """The first chain has its share of the reads, the others the rest."""
        while time.monotonic() < ends:
            hot = self._random.random() < _HOT_SHARE
            hashes = chains[0] if hot else chains[self._random.randrange(1, len(chains))]
            await self._fetcher.fetch(self._store, hashes, deadline=time.monotonic() + _PATIENT_S)
            self.missed += bool(self._store.missing(hashes))
            self._store.drop(hashes)


@contextlib.asynccontextmanager
async def _cluster(
    folder: Path, secrets: CacheSecrets, settings: ClusterSettings
) -> AsyncIterator[_Cluster]:
    cluster = _Cluster(folder, secrets, settings)
    room = (1 + _OTHERS) * _BLOCKS
    async with AsyncExitStack() as stack:
        with ExitStack() as caches:
            for name in _names():
                cluster.nodes[name] = _Node(name, *cluster.store(caches, name, blocks=room))
            async with stack:
                for node in cluster.nodes.values():
                    await cluster.start(stack, node)
                yield cluster
