"""A HostStore that is a dictionary: what it has, in order, and nothing about arenas."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.ring import position_of
from cachemgr.shard import NO_PARENT, SEGMENT_BLOCKS, BlockAddress, address_of

FORMAT = b"f" * 16


def chain(seed: str, blocks: int) -> list[BlockAddress]:
    """Addresses of the blocks of a made-up chain."""
    names = [BlockHash(blake2b(f"{seed}/{i}".encode(), digest_size=16).digest()) for i in range(blocks)]
    return [address_of(names, index) for index in range(blocks)]


def lone_blocks(seed: str, count: int) -> list[BlockAddress]:
    """The first blocks of as many chains: each a segment of its own."""
    names = [BlockHash(blake2b(f"{seed}/{i}".encode(), digest_size=16).digest()) for i in range(count)]
    return [BlockAddress(name, NO_PARENT, name, 0) for name in names]


@dataclass(frozen=True, slots=True)
class DictShard:
    address: BlockAddress


class DictStore:
    """Counts the looks over all of it in `looks`, and what is held in `held`."""

    def __init__(self, blocks: Sequence[BlockAddress] = (), *, format_id: bytes = FORMAT) -> None:
        self.format_id = format_id
        self.payload_nbytes = 1024
        self.blocks = {block.hash: block for block in blocks}
        self.looks = 0
        self.held = 0
        self.most_held_at_once = 0

    def hold(self, names: Sequence[BlockHash]) -> list[DictShard | None]:
        found = [DictShard(self.blocks[name]) if name in self.blocks else None for name in names]
        self.held += sum(shard is not None for shard in found)
        self.most_held_at_once = max(self.most_held_at_once, len(names))
        return found

    def let_go(self, shards: Sequence[DictShard]) -> None:
        self.held -= len(shards)

    def resident(self, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> list[BlockAddress]:
        self.looks += 1
        arcs = list(zip(low.tolist(), high.tolist(), strict=True))
        return [
            block
            for block in self.blocks.values()
            if any(first <= position_of(block.segment) <= last for first, last in arcs)
        ]


assert SEGMENT_BLOCKS == 16
