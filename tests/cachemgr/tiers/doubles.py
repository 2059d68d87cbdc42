"""A store, tiers and peers in memory, as slow or as wrong as a test wants them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cachemgr import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress
from tests.cachemgr.tiers.simulated_time import clock

NBYTES = 1 << 20


def names(blocks: int, *, seed: int = 0, common: int = 0) -> list[BlockHash]:
    """A prompt; the first `common` blocks are those of seed 0."""
    return [
        BlockHash((0 if at < common else seed).to_bytes(8, "little") + at.to_bytes(8, "little"))
        for at in range(blocks)
    ]


class Slot:
    """HeldShard and IncomingShard at once."""

    header = b""

    def __init__(self, address: BlockAddress) -> None:
        self.address = address
        self.payload = memoryview(b"")


class StoreDouble:
    """As much of a HostStore as fetching and demotion use."""

    format_id = bytes(16)
    payload_nbytes = NBYTES

    def __init__(self, here: Iterable[BlockHash] = (), *, full: bool = False) -> None:
        self.here = set(here)
        self.reserved: set[BlockHash] = set()
        self.seen: Counter[BlockHash] = Counter()
        self.full = full
        self.brought: Counter[BlockHash] = Counter()
        self.longest_uses = 0

    def missing(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [at for at, name in enumerate(hashes) if name not in self.here and name not in self.reserved]

    def uses(self, hashes: Sequence[BlockHash]) -> list[int]:
        self.longest_uses = max(self.longest_uses, len(hashes))
        return [self.seen[name] for name in hashes]

    def hold(self, hashes: Sequence[BlockHash]) -> list[Slot | None]:
        return [Slot(BlockAddress(name, name, name, 0)) if name in self.here else None for name in hashes]

    def let_go(self, shards: Sequence[Slot]) -> None:
        pass

    def reserve(self, address: BlockAddress) -> Slot | None:
        if self.full or not self.missing([address.hash]):
            return None
        self.reserved.add(address.hash)
        return Slot(address)

    def publish(self, slot: Slot, header: bytes) -> None:
        self.reserved.discard(slot.address.hash)
        self.here.add(slot.address.hash)
        self.brought[slot.address.hash] += 1

    def abort(self, slot: Slot) -> None:
        self.reserved.discard(slot.address.hash)

    def run(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading ones are here."""
        return next((at for at, name in enumerate(hashes) if name not in self.here), len(hashes))


class TierDouble:
    """A LowerTier. Seconds are those of the loop."""

    def __init__(
        self,
        name: str = "redis",
        has: Iterable[BlockHash] = (),
        *,
        ask_s: float = 0.0,
        first_s: float = 0.0,
        block_s: float = 0.0,
        admit_seen: int = 1,
    ) -> None:
        self.name = name
        self.admit_seen = admit_seen
        self.usable = True
        self.has = set(has)
        self.ask_s, self.first_s, self.block_s = ask_s, first_s, block_s
        self.pauses: list[float] | None = None
        """Before each block of the next get, instead of `first_s` and `block_s`."""
        self.deaf = False
        """Ignores its deadlines."""
        self.after_s = 0.0
        """What it takes to end when everything has come."""
        self.ended = 0
        """Gets that ended by themselves."""
        self.clings = False
        """A slot that it reserved stays reserved when it is cancelled, as a disk that hangs would do."""
        self.lacks: set[BlockHash] = set()
        """Says that it has them."""
        self.raises = False
        self.fails_to_start = False
        self.asks: list[int] = []
        self.gets: list[list[int]] = []
        self.puts: list[list[int]] = []
        self.put_names: list[BlockHash] = []
        self.under_way = 0
        self.started = self.closed = 0
        self.forgotten: list[Any] = []

    async def start(self) -> None:
        if self.fails_to_start:
            raise ValueError("our own bug")
        self.started += 1

    async def known(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> int:
        self.asks.append(len(blocks))
        if not await self._pause(self.ask_s, deadline):
            return 0
        if self.raises:
            raise ValueError("our own bug")
        return next((at for at, block in enumerate(blocks) if block.hash not in self.has), len(blocks))

    async def get(
        self,
        store: HostStore,
        blocks: Sequence[BlockAddress],
        *,
        deadline: float,
        arrived: Callable[[int], None],
    ) -> None:
        self.gets.append([block.index for block in blocks])
        pauses = self.pauses or [self.first_s or self.block_s, *[self.block_s] * len(blocks)]
        self.under_way += 1
        try:
            for block, seconds in zip(blocks, pauses, strict=False):
                slot = store.reserve(block)
                try:
                    if not await self._pause(seconds, deadline):
                        return
                    if block.hash not in self.has or block.hash in self.lacks:
                        return
                    if slot is not None:
                        store.publish(slot, b"")
                        slot = None
                        arrived(NBYTES)
                finally:
                    if slot is not None and not self.clings:
                        store.abort(slot)
            await asyncio.sleep(self.after_s)
            self.ended += 1
        finally:
            self.under_way -= 1

    def put(self, store: HostStore, blocks: Sequence[BlockAddress]) -> None:
        if self.raises:
            raise ValueError("our own bug")
        self.puts.append([block.index for block in blocks])
        self.put_names += [block.hash for block in blocks]
        self.has.update(block.hash for block in blocks)

    async def forget(self, store: HostStore) -> None:
        self.forgotten.append(store)

    def counters(self) -> dict[str, float]:
        return {"get_blocks_total": 1.0, "queue_blocks": 2.0}

    async def close(self) -> None:
        self.closed += 1

    async def _pause(self, seconds: float, deadline: float) -> bool:
        """False if the deadline came first."""
        left = deadline - clock()
        if seconds > left and not self.deaf:
            await asyncio.sleep(max(0.0, left))
            return False
        await asyncio.sleep(seconds)
        return True


class PeersDouble:
    """Other nodes."""

    def __init__(self, has: Iterable[BlockHash] = (), *, ask_s: float = 0.0, block_s: float = 0.0) -> None:
        self.has = set(has)
        self.ask_s, self.block_s = ask_s, block_s
        self.hangs_at: int | None = None
        """With a slot reserved for that block, whoever cancels it."""
        self.asks = 0
        self.deadlines: list[float] = []
        self.under_way = 0

    async def fetch(self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float) -> None:
        self.asks += 1
        self.deadlines.append(deadline)
        self.under_way += 1
        try:
            await asyncio.sleep(self.ask_s)
            for at, name in enumerate(hashes):
                if not store.missing([name]):
                    continue
                if name not in self.has:
                    return
                await asyncio.sleep(self.block_s)
                slot = store.reserve(BlockAddress(name, name, name, at))
                if at == self.hangs_at:
                    await asyncio.sleep(1000)
                if slot is not None:
                    store.publish(slot, b"")
        finally:
            self.under_way -= 1
