"""What rows of lower tiers share: blocks in a small host store, a tier on a loop of its own, and what whoever
uses a store's own client has to do beside it.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachemgr import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import ALIGN, BlockAddress, ShardCheck, address_of
from cachemgr.tiers.contract import LowerTier
from scripts.bench.cache import fill
from scripts.bench.peer_node import READER, CacheNode, mib_format, opened_node

_READY_S = 20.0
_CALL_S = 60.0
_LOOK_S = 0.0005
_PIECE_NBYTES = 256 << 10


class Blocks:
    """`count` blocks of so many MiB; `renew` replaces them by as many of other names."""

    def __init__(self, node: CacheNode, *, mib: int, count: int) -> None:
        self.store: HostStore = node.store
        self.nbytes = count * (mib << 20)
        self._cache = node.cache
        self._count = count
        self._payload = np.random.default_rng(mib).integers(0, 256, mib << 20, np.uint8)
        self._turn = itertools.count()
        self.names: list[BlockHash] = []
        self.addresses: list[BlockAddress] = []
        self.renew()

    def renew(self) -> None:
        """Make others, and let go of those that are here."""
        if self.names:
            self.drop()
        first = next(self._turn)
        tokens = np.arange(first, first + self._count * 32)
        self.names = self._cache.hashes(tokens, namespace="bench")
        fill(self._cache, self.names, self._payload)
        self.addresses = [address_of(self.names, index) for index in range(self._count)]

    def drop(self) -> None:
        """They are not here any more."""
        if self.store.drop(self.names) != self._count:
            raise RuntimeError("a block was not here")


@contextmanager
def blocks_here(home: Path, *, mib: int, count: int) -> Iterator[tuple[Blocks, Path]]:
    """Blocks in an arena that has room for them, and a folder; both are gone at the end."""
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        folder = Path(scratch)
        with opened_node(folder, READER, mib_format(mib), blocks=count + 2) as node:
            yield Blocks(node, mib=mib, count=count), folder


class OpenTier:
    """A lower tier on a loop that runs while it is asked."""

    def __init__(self, make: Callable[[], LowerTier]) -> None:
        self._runner = asyncio.Runner()
        try:
            self._tier = self._runner.run(_opened(make))
        except BaseException:
            self._runner.close()
            raise

    def get(self, blocks: Blocks) -> float:
        """Seconds until all are here."""
        return self._runner.run(self._get(blocks))

    def put(self, blocks: Blocks) -> float:
        """Seconds until all are kept there."""
        return self._runner.run(self._put(blocks))

    def known(self, blocks: Blocks) -> int:
        """How many leading ones it has."""
        return self._runner.run(
            self._tier.known(blocks.store, blocks.addresses, deadline=time.monotonic() + _CALL_S)
        )

    def close(self) -> None:
        """Let go of everything."""
        try:
            self._runner.run(self._tier.close())
        finally:
            self._runner.close()

    async def _get(self, blocks: Blocks) -> float:
        arrived: list[int] = []
        started = time.perf_counter()
        await self._tier.get(
            blocks.store, blocks.addresses, deadline=time.monotonic() + _CALL_S, arrived=arrived.append
        )
        seconds = time.perf_counter() - started
        if len(arrived) != len(blocks.addresses):
            raise RuntimeError(f"{len(arrived)} of {len(blocks.addresses)} blocks came: {self._said()}")
        return seconds

    async def _put(self, blocks: Blocks) -> float:
        wanted = self._tier.counters()["put_blocks_total"] + len(blocks.addresses)
        limit = time.monotonic() + _CALL_S
        started = time.perf_counter()
        self._tier.put(blocks.store, blocks.addresses)
        while self._tier.counters()["put_blocks_total"] < wanted:
            if time.monotonic() > limit:
                raise RuntimeError(f"blocks were not kept: {self._said()}")
            await asyncio.sleep(_LOOK_S)
        return time.perf_counter() - started

    def _said(self) -> dict[str, float]:
        return {name: value for name, value in self._tier.counters().items() if value}


@contextmanager
def open_tier(make: Callable[[], LowerTier]) -> Iterator[OpenTier]:
    """The tier, usable, and closed at the end."""
    tier = OpenTier(make)
    try:
        yield tier
    finally:
        tier.close()


async def _opened(make: Callable[[], LowerTier]) -> LowerTier:
    tier, limit = make(), time.monotonic() + _READY_S
    await tier.start()
    while not tier.usable:
        if time.monotonic() > limit:
            raise RuntimeError(f"{tier.name} did not get ready")
        await asyncio.sleep(_LOOK_S)
    return tier


class Copies:
    """Where the other side of a `get` puts what it got: as aligned as a slot, checked as a slot is."""

    def __init__(self, blocks: Blocks) -> None:
        self._store = blocks.store
        nbytes = blocks.store.payload_nbytes
        self.slots = [_aligned(nbytes) for _ in blocks.addresses]

    def take(self, index: int, header: bytes, payload: memoryview, address: BlockAddress) -> None:
        """Copy it in pieces, with the tag over each while it is hot; RuntimeError if it does not pass."""
        check = self._store.check(header, address)
        if not isinstance(check, ShardCheck):
            raise RuntimeError(f"{check} for block {index}")
        slot, source = self.slots[index], np.frombuffer(payload, np.uint8)
        for start in range(0, slot.nbytes, _PIECE_NBYTES):
            piece = slot[start : start + _PIECE_NBYTES]
            np.copyto(piece, source[start : start + _PIECE_NBYTES])
            check.update(piece.data)
        if not check.passed():
            raise RuntimeError(f"block {index} did not pass")


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    room = np.zeros(nbytes + ALIGN, np.uint8)
    start = -room.ctypes.data % ALIGN
    return room[start : start + nbytes]


def windows(addresses: Sequence[BlockAddress], nbytes: int, window_nbytes: int) -> Iterator[range]:
    """Indices of blocks of `nbytes` each, as many at once as a window holds, at least one."""
    step = max(1, window_nbytes // nbytes)
    return (range(at, min(at + step, len(addresses))) for at in range(0, len(addresses), step))
