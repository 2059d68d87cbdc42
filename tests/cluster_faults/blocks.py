"""Chains of blocks that every process of a test can name and whose bytes it can foretell."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachemgr import BlockFormat, BlockHash, PrefixCache
from tests.cachemgr.host import payload_of

FORMATS = (
    BlockFormat(b"fault format one", "float32", layers=4, kv_heads=2, head_dim=32, block_tokens=8),
    BlockFormat(b"fault format two", "float16", layers=2, kv_heads=2, head_dim=32, block_tokens=16),
)
"""Two engines' worth: 16 KiB and 8 KiB a block."""

MAX_BLOCKS = 40
"""Of one chain: two segments and a half."""

_SPREAD = 1000
"""More tokens than a chain has: prompts of different seeds have no token in common."""


@dataclass(frozen=True, slots=True)
class ChainId:
    """A prompt: its format, the seed of its tokens, and how many blocks it has."""

    format: int
    seed: int
    blocks: int

    def names(self, cache: PrefixCache) -> list[BlockHash]:
        """Its block hashes; `cache` is one of its format."""
        tokens = np.arange(self.blocks * FORMATS[self.format].block_tokens) + _SPREAD * self.seed
        return cache.hashes(tokens, namespace="faults")

    def payload(self, name: BlockHash) -> npt.NDArray[np.uint8]:
        """The bytes of the block of this name, and of no other."""
        return payload_of(name, FORMATS[self.format])

    def __str__(self) -> str:
        return f"chain {self.format}/{self.seed} of {self.blocks}"
