"""A host for tests: opens caches on one directory, and fills them with blocks that can be told apart."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachemgr import BlockFormat, BlockHash, CacheSecrets, CacheSettings, HostCache, PrefixCache, open_cache
from cachemgr.contract import RemoteTiers
from cachemgr.host_contract import HostStore
from cachemgr.shard import slot_nbytes

FORMAT = BlockFormat(
    kv_identity=b"identity of test", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_tokens=4
)
SECRETS = CacheSecrets(bytes(range(32)), {1: bytes(range(32, 64))})


class Clock:
    """Monotonic seconds that move only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Host:
    """One node: a directory that stands for /dev/shm, a clock, and the caches opened on them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()
        self._opened: list[HostCache] = []

    def settings(self, *, blocks: int, block_format: BlockFormat = FORMAT, **others: object) -> CacheSettings:
        nbytes = blocks * slot_nbytes(block_format.payload_nbytes)
        return CacheSettings(host_bytes=nbytes, directory=str(self.directory), **others)  # type: ignore[arg-type]

    def open(
        self,
        *,
        blocks: int = 64,
        block_format: BlockFormat = FORMAT,
        secrets: CacheSecrets = SECRETS,
        remote: Callable[[HostStore], RemoteTiers] | None = None,
        **others: object,
    ) -> HostCache:
        settings = self.settings(blocks=blocks, block_format=block_format, **others)
        cache = open_cache(block_format, settings, secrets, clock=self.clock, remote=remote)
        self._opened.append(cache)
        return cache

    def arenas(self) -> list[Path]:
        return sorted(self.directory.iterdir())

    def close(self) -> None:
        for cache in self._opened:
            cache.close()


def chain(cache: PrefixCache, blocks: int, *, seed: int = 0, namespace: str = "org") -> list[BlockHash]:
    """Names of a prompt of `blocks` blocks; prompts of one seed are prefixes of each other."""
    tokens = np.arange(blocks * FORMAT.block_tokens) + 1_000_000 * seed
    return cache.hashes(tokens, namespace=namespace)


def payload_of(name: BlockHash, block_format: BlockFormat = FORMAT) -> npt.NDArray[np.uint8]:
    """The bytes that a block of this name has in tests: its name, repeated."""
    return np.resize(np.frombuffer(name, np.uint8), block_format.payload_nbytes)


def write(cache: PrefixCache, hashes: Sequence[BlockHash], index: int) -> bool:
    """Commit one block; False if there was nothing to do or no room."""
    pending = cache.prepare(hashes, index)
    if pending is None:
        return False
    pending.payload[:] = payload_of(hashes[index])
    cache.commit(pending)
    return True


def fill(cache: PrefixCache, hashes: Sequence[BlockHash]) -> int:
    """Commit every block of a chain, in order; how many were written."""
    return sum(write(cache, hashes, index) for index in range(len(hashes)))


def read(
    cache: PrefixCache, hashes: Sequence[BlockHash], *, while_leased: Callable[[], object] = bool
) -> int:
    """Restore what is known of a chain and check every byte; how many blocks came back."""
    lease = cache.acquire(hashes, deadline=None)
    while_leased()
    got: dict[int, bytes] = {}

    def sink(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        assert len(blocks) == len(payloads)
        got.update((block, payload.tobytes()) for block, payload in zip(blocks, payloads, strict=True))

    usable = cache.restore(lease, first=0, sink=sink)
    lease.release()
    assert list(got) == list(range(usable))
    for block, payload in got.items():
        assert payload == payload_of(hashes[block]).tobytes(), f"block {block} has foreign bytes"
    return usable
