"""The row of the tag: what authenticating a block costs, against copying it once."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cachemgr.contract import BlockFormat, BlockHash
from cachemgr.secrets import CacheSecrets
from cachemgr.shard import ShardSealer, address_of
from scripts.bench.harness import Measurement, Reading, alternate, timed

_BLOCKS = 64
_FORMAT = BlockFormat(bytes(range(16)), "float16", layers=32, kv_heads=4, head_dim=128, block_tokens=32)


def measurements() -> list[Measurement]:
    """The one row."""
    return [Measurement(("tag.vs_memcpy",), _tag)]


def _tag() -> Iterator[Reading]:
    """Blocks of 2 MiB, 128 MiB of them, so that both sides read memory and not a processor's cache."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (_BLOCKS, _FORMAT.payload_nbytes), np.uint8)
    copies = np.zeros_like(blocks)
    names = [BlockHash(number.to_bytes(16, "little")) for number in range(1, _BLOCKS + 1)]
    with tempfile.TemporaryDirectory() as folder:
        sealer = ShardSealer(_FORMAT, CacheSecrets.generate(Path(folder) / "secrets").tags)

    def seal() -> None:
        for index in range(_BLOCKS):
            sealer.seal(address_of(names, index), blocks[index])

    def copy() -> None:
        for index in range(_BLOCKS):
            np.copyto(copies[index], blocks[index])

    paired = alternate(lambda: timed(seal), lambda: timed(copy), rounds=15, warmups=2)
    tag, memcpy = (blocks.nbytes / seconds / 1e9 for seconds in paired.medians)
    yield Reading("tag.vs_memcpy", paired.ratio, f"tags at {tag:.1f} GB/s, copies at {memcpy:.1f} GB/s")
