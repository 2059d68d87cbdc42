"""Doubles of stores and peers: nodes of one process that reach into each other and are killed anywhere."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from cachemgr.breaker import Breaker
from cachemgr.cluster.contract import Fetched
from cachemgr.contract import BlockHash
from cachemgr.ring import KeptRings, NodeId, position_of
from cachemgr.shard import SEGMENT_BLOCKS, BlockAddress, address_of
from tests.cachemgr.cluster.moves.virtual_time import clock

FORMAT = b"format of a test"
NBYTES = 1 << 16


def chain(seed: int, blocks: int) -> list[BlockHash]:
    """Names of a prompt of so many blocks; prompts of one seed are prefixes of each other."""
    return [BlockHash(blake2b(f"{seed}/{n}".encode(), digest_size=16).digest()) for n in range(blocks)]


def addresses(seed: int, blocks: int) -> list[BlockAddress]:
    names = chain(seed, blocks)
    return [address_of(names, index) for index in range(blocks)]


@dataclass(frozen=True, slots=True)
class Held:
    address: BlockAddress


class MemoryStore:
    """A HostStore that knows which blocks it has, and counts what was written into it."""

    format_id = FORMAT
    payload_nbytes = NBYTES

    def __init__(self, *, room: int = 1 << 30) -> None:
        self.blocks: dict[BlockHash, BlockAddress] = {}
        self.pins: dict[BlockHash, int] = {}
        self.room = room
        self.written: list[BlockHash] = []

    def missing(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [index for index, name in enumerate(hashes) if name not in self.blocks]

    def hold(self, names: Sequence[BlockHash]) -> list[Held | None]:
        held = [Held(self.blocks[name]) if name in self.blocks else None for name in names]
        for shard in held:
            if shard is not None:
                self.pins[shard.address.hash] = self.pins.get(shard.address.hash, 0) + 1
        return held

    def let_go(self, shards: Sequence[Held]) -> None:
        for shard in shards:
            self.pins[shard.address.hash] -= 1

    def take(self, address: BlockAddress) -> bool:
        """What reserve and publish do together; False if there is no room."""
        if address.hash not in self.blocks:
            if len(self.blocks) >= self.room:
                return False
            self.blocks[address.hash] = address
            self.written.append(address.hash)
        return True

    def resident(self, low: Sequence[int], high: Sequence[int]) -> list[BlockAddress]:
        arcs = [(int(a), int(b)) for a, b in zip(low, high, strict=True)]
        assert arcs == sorted(arcs)
        return [
            address
            for address in self.blocks.values()
            if any(a <= position_of(address.segment) <= b for a, b in arcs)
        ]

    def drop(self, names: Sequence[BlockHash]) -> int:
        going = [name for name in names if name in self.blocks and not self.pins.get(name)]
        for name in going:
            del self.blocks[name]
        return len(going)


class MemoryRingFile:
    """A RingFile that outlives the node, not the test."""

    def __init__(self) -> None:
        self.kept: KeptRings | None = None

    def load(self) -> KeptRings | None:
        return self.kept

    def save(self, rings: KeptRings) -> None:
        self.kept = rings


@dataclass
class Wire:
    """What lies between nodes: latency, and what a test does at the nth moment of a call."""

    latency_s: float = 0.001
    moments: int = 0
    at_moment: Callable[[int, NodeId, NodeId], None] = lambda number, caller, callee: None
    cut: set[frozenset[NodeId]] = field(default_factory=set)
    refuse_puts: set[NodeId] = field(default_factory=set)
    calls: list[tuple[float, NodeId, NodeId, str, int]] = field(default_factory=list)

    async def moment(self, caller: NodeId, callee: NodeId) -> None:
        self.moments += 1
        self.at_moment(self.moments, caller, callee)
        await asyncio.sleep(self.latency_s)


class DirectPeer:
    """A Peer that reaches into the other node's store, or finds it dead."""

    def __init__(self, node: NodeId, caller: "object", cluster: "object") -> None:
        self.node = node
        self.load = 0.0
        self._caller = caller
        self._cluster = cluster
        self._breaker = Breaker(f"peer {node}", open_s=5.0, clock=clock)

    @property
    def usable(self) -> bool:
        return self._breaker.closed

    @property
    def down_since(self) -> float | None:
        return self._breaker.down_since

    async def get(self, store: MemoryStore, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        arrived = [False] * len(blocks)
        for index, block in enumerate(blocks):  # one moment each: killed in the middle, some have come
            there = await self._call("get", 1)
            if there is None:
                break
            if block.hash in there.store.blocks:
                arrived[index] = store.take(block)
        return Fetched(tuple(arrived), NBYTES * sum(arrived))

    async def put(self, store: MemoryStore, blocks: Sequence[BlockHash], *, deadline: float) -> list[bool]:
        there = await self._call("put", len(blocks))
        if there is None or self.node in self._cluster.wire.refuse_puts or not there._stores():
            return [False] * len(blocks)
        taken = [name in store.blocks and there.store.take(store.blocks[name]) for name in blocks]
        await self._cluster.wire.moment(self._caller.node, self.node)  # there, and not yet acknowledged
        return taken if self._answers() else [False] * len(blocks)

    async def lookup(
        self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float
    ) -> list[BlockAddress | None]:
        there = await self._call("lookup", len(names))
        return [None if there is None else there.store.blocks.get(name) for name in names]

    async def list_arcs(self, format_id: bytes, low, high, *, after: bytes, deadline: float):  # type: ignore[no-untyped-def]
        there = await self._call("list_arcs", len(low))
        if there is None:
            return None
        blocks = [block for block in there.store.resident(low, high) if block.hash > after]
        listed = sorted(blocks, key=lambda block: block.hash)
        return listed[:PART], listed[PART - 1].hash if len(listed) > PART else b""

    async def moved(self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float) -> bool:
        there = await self._call("moved", len(names))
        if there is None:
            return False
        there.handover.acknowledged(self._caller.node, format_id, names)
        return True

    async def exchange_ring(self, *, deadline: float) -> object:
        there = await self._call("exchange_ring", 0)
        return None if there is None else there.rings.version

    def _answers(self) -> bool:
        there = self._cluster.nodes[self.node]
        return there.alive and frozenset({self._caller.node, self.node}) not in self._cluster.wire.cut

    async def _call(self, what: str, count: int):  # type: ignore[no-untyped-def]
        """The other node, once the call has got there; None if it did not."""
        if not self._breaker.admit():
            return None
        self._cluster.wire.calls.append((clock(), self._caller.node, self.node, what, count))
        await self._cluster.wire.moment(self._caller.node, self.node)
        if not self._answers():
            self._breaker.trouble("refused", refused=True)
            return None
        self._breaker.answered()
        there = self._cluster.nodes[self.node]
        mine, theirs = self._caller.rings, there.rings
        if mine.version < theirs.version:
            mine.install(theirs.ring.state)
        elif theirs.version < mine.version:
            theirs.install(mine.ring.state)
        return there


PART = 16
"""Addresses in one part of a listing."""

assert SEGMENT_BLOCKS == 16
