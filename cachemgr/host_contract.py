"""The host tier as everything beyond this process sees it: other nodes, and the tiers below.

Giving:     `hold` pins → the bytes are read from the arena → `let_go`.
Receiving:  `reserve` → the bytes come into the slot → `check`, fed with each piece → `publish` or `abort`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.shard import BlockAddress, ShardCheck, Verdict


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Where a shard lies in a shared-memory file that a process on the same host can map."""

    path: str
    device: int
    inode: int
    offset: int
    """Bytes from the start of the file to the shard's header."""


class HeldShard(Protocol):
    """A published shard of this host's tier, pinned (if it is in an arena of ours) until let go."""

    @property
    def address(self) -> BlockAddress:
        """Where the block stands in its chain, as its header says."""
        ...

    @property
    def header(self) -> bytes:
        """A private copy of the 128 header bytes."""
        ...

    @property
    def payload(self) -> memoryview:
        """The bytes in the arena, read-only; zeros if it was lost. RuntimeError after `let_go`."""
        ...

    @property
    def place(self) -> ArenaPlace:
        """Where it lies, for readers on the same host."""
        ...


class IncomingShard(Protocol):
    """A reserved slot for a shard that comes from elsewhere: publish or abort it exactly once."""

    @property
    def address(self) -> BlockAddress:
        """What the slot was reserved for."""
        ...

    @property
    def payload(self) -> memoryview:
        """Writable, HostStore.payload_nbytes long, 128-byte aligned. Nobody reads it before `publish`.

        RuntimeError once published or aborted.
        """
        ...


class HostStore(Protocol):
    """The host tier of one block format, as all beyond it see it. Any thread; waits for one short lock.

    Calls on a store that was closed meanwhile find nothing and take nothing; they never raise for that.
    """

    @property
    def format_id(self) -> bytes:
        """16 bytes: kv_identity and geometry. Peers exchange blocks of equal ids only."""
        ...

    @property
    def payload_nbytes(self) -> int:
        """Bytes of each payload."""
        ...

    @property
    def blocks(self) -> int:
        """How many are here now."""
        ...

    def missing(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Which of a chain's blocks are neither here nor being written here, ascending."""
        ...

    def uses(self, names: Sequence[BlockHash]) -> list[int]:
        """How often each was seen here, made or found, also if it is gone; 0 for what was never heard of."""
        ...

    def hold(self, names: Sequence[BlockHash]) -> list[HeldShard | None]:
        """Pin each that is here; None for each that is not. Any names, not only a run."""
        ...

    def let_go(self, shards: Sequence[HeldShard]) -> None:
        """Unpin. Idempotent per shard."""
        ...

    def reserve(self, address: BlockAddress) -> IncomingShard | None:
        """A slot for a block from elsewhere; None if it is here, being written, or nothing may go for it.

        Its parent need not be here: a node holds the segments that the ring gives it.
        """
        ...

    def check(self, header: bytes, address: BlockAddress) -> ShardCheck | Verdict:
        """Judge a private copy of a header; a ShardCheck to feed the payload to, if only the tag is left."""
        ...

    def publish(self, shard: IncomingShard, header: bytes) -> None:
        """Its payload is written and passed its check under this header, which is kept as it came."""
        ...

    def abort(self, shard: IncomingShard) -> None:
        """Give the slot back unpublished."""
        ...

    def reject(self, shard: HeldShard, verdict: Verdict) -> None:
        """A held shard failed a check: nobody finds it any more."""
        ...

    def resident(self, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> list[BlockAddress]:
        """Blocks in our own arenas whose segment's position lies in an arc [low, high], both included.

        [N] each, sorted, disjoint, none wraps. Reads every header in one vectorised pass, without the lock:
        a hint, as blocks come and go meanwhile. About 2 µs per block found: run it off the loop.
        """
        ...

    def drop(self, names: Sequence[BlockHash]) -> int:
        """Let go of blocks that belong to other nodes now; pinned ones stay. How many went."""
        ...
