"""Nodes for tests of a lower tier: one whose blocks are kept there, one that brings them back."""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from cachemgr import BlockFormat, BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress, address_of
from cachemgr.tiers.contract import LowerTier
from tests.cachemgr.host import FORMAT, Host, chain, fill
from tests.cachemgr.node import Node, open_node

LIMIT_S = 20.0
"""Far longer than anything takes."""

WIDE = BlockFormat(
    kv_identity=b"identity of test", dtype="float32", layers=4, kv_heads=4, head_dim=64, block_tokens=32
)
"""Blocks of 256 KiB: longer than any piece that is read at once."""


def addresses(names: Sequence[BlockHash]) -> list[BlockAddress]:
    return [address_of(names, index) for index in range(len(names))]


def soon(seconds: float = LIMIT_S) -> float:
    return time.monotonic() + seconds


async def eventually(condition: Callable[[], object], *, limit_s: float = LIMIT_S) -> None:
    """For what happens in other tasks and has no event to wait for."""
    deadline = soon(limit_s)
    while not condition():
        assert time.monotonic() < deadline, f"it did not become true within {limit_s:g} s"
        await asyncio.sleep(0.005)


class Pair:
    """`near` has a prompt's blocks; `far` has none."""

    def __init__(self, host: Host, *, blocks: int = 20, block_format: BlockFormat = FORMAT) -> None:
        self.near = open_node(host, "near", blocks=4 * blocks, block_format=block_format)
        self.far = open_node(host, "far", blocks=4 * blocks, block_format=block_format)
        self.format = block_format
        self.names = chain_of(self.near, blocks, block_format=block_format)
        self.blocks = addresses(self.names)
        self.arrived: list[int] = []

    def whole(self) -> int:
        """How many leading blocks `far` has, each with the right bytes."""
        return whole_run(self.far.store, self.names, self.format)

    async def keep(self, tier: LowerTier, blocks: Sequence[BlockAddress] | None = None) -> None:
        """Put what `near` has, and wait until it is there."""
        blocks = self.blocks if blocks is None else blocks
        tier.put(self.near.store, blocks)
        await eventually(lambda: tier.counters()["queue_blocks"] == 0)
        deadline = soon()
        while await tier.known(self.near.store, blocks, deadline=soon()) < len(blocks):
            assert time.monotonic() < deadline, tier.counters()
            await asyncio.sleep(0.01)

    async def fetch(self, tier: LowerTier, *, seconds: float = LIMIT_S) -> int:
        """Bring all into `far`; how many leading blocks it has then, each whole."""
        await tier.get(self.far.store, self.blocks, deadline=soon(seconds), arrived=self.arrived.append)
        return self.whole()


def chain_of(
    node: Node, blocks: int, *, block_format: BlockFormat = FORMAT, seed: int = 0
) -> list[BlockHash]:
    """Names of a prompt whose blocks the node made."""
    if block_format is FORMAT:
        names = chain(node.cache, blocks, seed=seed)
        assert fill(node.cache, names) == blocks
        return names
    tokens = np.arange(blocks * block_format.block_tokens) + 1_000_000 * seed
    names = node.cache.hashes(tokens, namespace="org")
    for index, name in enumerate(names):
        pending = node.cache.prepare(names, index)
        assert pending is not None
        pending.payload[:] = np.resize(np.frombuffer(name, np.uint8), block_format.payload_nbytes)
        node.cache.commit(pending)
    return names


def whole_run(store: HostStore, names: Sequence[BlockHash], block_format: BlockFormat = FORMAT) -> int:
    """How many leading blocks a store has; AssertionError if one of any has foreign bytes."""
    shards = store.hold(names)
    try:
        for shard, name in zip(shards, names, strict=True):
            if shard is not None:
                right = np.resize(np.frombuffer(name, np.uint8), block_format.payload_nbytes).tobytes()
                assert bytes(shard.payload) == right, "foreign bytes"
                assert shard.address.hash == name
        return next((index for index, shard in enumerate(shards) if shard is None), len(shards))
    finally:
        store.let_go([shard for shard in shards if shard is not None])
