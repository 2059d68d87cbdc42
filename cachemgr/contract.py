"""What the cache manager promises: names for blocks, leases on them, and the tiers behind them.

The read path: `hashes` names the blocks of a prompt → `lookup` counts the longest known run → `acquire`
pins it as a `Lease` → `restore` copies each block to private memory, checks identity and tag, hands it to
the engine → `release`. The write path: `prepare` reserves a slot → the engine writes the payload into it →
`commit` makes it visible.

Failure law: trouble in here is a miss and a counter, never an exception on the request path and never wrong
bytes. Only misuse (our own bug) raises.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: BLAKE2b-128 of the chain up to and including the block (see block_hash.py)."""

ELEMENT_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Element types a block may hold; numpy itself knows no bfloat16, so sizes are stated here."""

Sink = Callable[[range, Sequence[npt.NDArray[np.uint8]]], None]
"""Takes checked payloads of consecutive blocks; the buffers are only valid during the call."""


@dataclass(frozen=True, slots=True)
class NamespaceShare:
    """What a namespace may hold of every arena, as fractions of its slots in [0, 1].

    `quota`: it gets no more; a block beyond goes for one of its own. `min_share`: so much of what it holds
    does not go for others.
    """

    quota: float = 1.0
    min_share: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The exact bytes of a block for one engine identity: what arenas, headers and tags are built from."""

    kv_identity: bytes
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int

    @property
    def payload_nbytes(self) -> int:
        """Bytes of one payload, [layers][k|v][head][token][dim]."""
        return (
            self.layers * 2 * self.kv_heads * self.block_tokens * self.head_dim * ELEMENT_NBYTES[self.dtype]
        )


class Lease(Protocol):
    """Pins the first `blocks` blocks of a chain until `release`; evictors pass them by.

    While blocks are fetched from beyond this process it is not ready; it is at its deadline at the latest.
    A block in the arena of another process of the node cannot be pinned: it counts here, and may be gone when
    it is restored.
    """

    @property
    def blocks(self) -> int:
        """How many leading blocks of the asked chain are pinned; may grow until `ready`."""
        ...

    @property
    def ready(self) -> bool:
        """True once nothing is on its way any more; `blocks` no longer changes."""
        ...

    def release(self) -> None:
        """Unpin, and wait for nothing any more. Idempotent; any thread, at any moment."""
        ...


class PendingBlock(Protocol):
    """A reserved slot: write the whole of `payload`, then commit or abort exactly once."""

    @property
    def payload(self) -> npt.NDArray[np.uint8]:
        """Writable view, BlockFormat.payload_nbytes long, 128-byte aligned."""
        ...


class PrefixCache(Protocol):
    """The cache manager as the backend sees it; one per engine identity and process."""

    def hashes(
        self, tokens: npt.NDArray[Any], *, namespace: str, salt: str = "", public: int = 0
    ) -> list[BlockHash]:
        """Names of the whole blocks of `tokens` (int32 or int64, [N]), chained. Pure; any thread.

        The first `public` blocks get the names that they have for everybody; the next one continues from
        there with the names of `namespace`. ValueError for public blocks together with a salt.
        """
        ...

    def public_blocks(self, tokens: npt.NDArray[Any], *, salt: str = "") -> int:
        """How many leading blocks of `tokens` are public; 0 with a salt, which asks for isolation."""
        ...

    def set_public(self, prefixes: Sequence[npt.NDArray[np.int64]]) -> None:
        """From now on the whole blocks of these are public, and no others. Any thread."""
        ...

    def set_shares(self, shares: Mapping[str, NamespaceShare]) -> None:
        """From now on namespaces share the host tier so; who is not named shares what is left. Any thread.

        ValueError for shares that cannot be kept; nothing has changed then.
        """
        ...

    def usage(self) -> Mapping[str, int]:
        """Blocks by namespace, of all that `set_shares` named, with those being written; "" for others."""
        ...

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the longest run of known blocks from the start. Memory only, no pin."""
        ...

    def acquire(
        self,
        hashes: Sequence[BlockHash],
        *,
        deadline: float | None,
        block_s: float | None = None,
        namespace: str = "",
    ) -> Lease:
        """Pin the longest known run (possibly empty); fetch what is missing of the chain until `deadline`.

        `namespace`: who asks; what nobody is known to hold yet is theirs from now on.

        `deadline`: time.monotonic() seconds; None: nothing is fetched. `block_s`: seconds that computing one
        more block would take: only what costs less is fetched. None: whatever is there is.
        """
        ...

    def restore(self, lease: Lease, *, first: int, sink: Sink) -> int:
        """Copy, check and hand over blocks first … lease.blocks−1; how many blocks from 0 are now usable.

        RuntimeError if the lease is not ready.
        Stops at the first block that fails its checks; the rest is not used, but checked as well. Each one
        that fails is removed and counted, so that `prepare` takes all that must be computed again. One that
        its writer, another process, changed meanwhile is counted as stale and only forgotten here. A block of
        another process stays where it is.
        """
        ...

    def prepare(self, hashes: Sequence[BlockHash], index: int, *, namespace: str = "") -> PendingBlock | None:
        """Reserve a slot for block `index` of the chain; None if it exists or nothing can be evicted.

        `namespace`: whose share it counts to.

        What another process of the node holds exists, too, unless a slot is free: a copy of our own then
        outlives that process, and costs nobody anything.
        """
        ...

    def commit(self, pending: PendingBlock) -> None:
        """Seal header and tag, then publish. Readers see the block whole or not at all."""
        ...

    def abort(self, pending: PendingBlock) -> None:
        """Give the slot back unpublished."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic counts and gauges by metric name without prefix, for the metrics page."""
        ...

    def close(self) -> None:
        """Unmap and unlock; the arena file stays for the next process. Idempotent."""
        ...


class MemoryPins(Protocol):
    """Hears of the host memory that blocks are copied to and from: a GPU copies faster where it is pinned.

    Arrays are uint8, contiguous, [slots, slot bytes]: no copy ever reaches across two slots.
    """

    def lock(self, memory: npt.NDArray[np.uint8]) -> None:
        """The memory is in use from now on. Never blocks."""
        ...

    def unlock(self, memory: npt.NDArray[np.uint8]) -> None:
        """The memory goes away when this returns."""
        ...

    def close(self) -> None:
        """Nothing is in use any more. Idempotent."""
        ...


class RemoteTiers(Protocol):
    """All tiers beyond this process's memory, for one block format. Any thread; never blocks."""

    @property
    def active(self) -> bool:
        """False: nothing is beyond, and nobody waits for it."""
        ...

    def fetch(
        self,
        hashes: Sequence[BlockHash],
        *,
        deadline: float,
        done: Callable[[], None],
        block_s: float | None = None,
    ) -> Callable[[], None]:
        """Bring what is missing of the chain into the host tier until `deadline` (monotonic seconds).

        `block_s`: seconds that computing one block instead would take; None: bring what there is.
        `done` is called exactly once, from any thread, also on failure, and perhaps before this returns.
        What is returned gives up interest: idempotent, from any thread; `done` is still called.
        """
        ...

    def offer(self, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of the chain was committed here."""
        ...

    def used(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks, a chain from its front, were found here and are being used once more."""
        ...

    def close(self) -> None:
        """Stop using the store: it goes away when this returns. Idempotent."""
        ...
