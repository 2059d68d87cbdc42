"""What the parts of a cluster node promise each other: stores, peers, the ring in force, membership.

    fetcher, replicator, mover          decide which block should be where
      │            │
      ▼            ▼
    Peers        HostStore              the other nodes; the host tier of this one, per block format
      │
      ▼
    control (gRPC), bulk channel        what travels

Everything but `HostStore` belongs to the IO thread (T3) and its asyncio loop. A position on the ring is that
of a segment: all blocks of a segment live together. The ring is no matter of safety: nodes that disagree
about it miss blocks, and never read wrong ones.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId, NodeSpec, Ring, RingState, Version
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
    """The host tier of one block format, as the cluster sees it. Any thread; waits for one short lock.

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


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a `get` brought: for each block, whether it is in the store now; bytes that were moved."""

    arrived: tuple[bool, ...]
    nbytes: int = 0
    hot: Mapping[BlockHash, int] = field(default_factory=dict)
    """Segments the peer finds hot → how many extra owners they have now."""


class Peer(Protocol):
    """Another node. Every call ends by its deadline (time.monotonic() seconds), and never raises for trouble.

    Trouble (refused, silent, half an answer, other bytes than asked) is a miss and a counter; enough of it
    opens the peer's breaker.
    """

    @property
    def node(self) -> NodeId:
        """Its id on the ring."""
        ...

    @property
    def usable(self) -> bool:
        """False while its breaker is open, it is draining, or no wire version is common."""
        ...

    @property
    def down_since(self) -> float | None:
        """When it was last found down, if it has not answered since; monotonic seconds."""
        ...

    @property
    def load(self) -> float:
        """Seconds that a request of ours is expected to wait there: latency seen × requests in flight."""
        ...

    async def get(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        """Bring what it has of `blocks` into `store`, checked and published, in the order asked."""
        ...

    async def put(
        self, store: HostStore, blocks: Sequence[BlockHash], *, deadline: float
    ) -> list[bool]:
        """Give it blocks of ours; True for each that it acknowledged: published there, or there already."""
        ...

    async def lookup(
        self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float
    ) -> list[BlockAddress | None]:
        """What it has of `names` in its own arenas; all None in trouble."""
        ...

    async def list_arcs(
        self,
        format_id: bytes,
        low: npt.NDArray[np.uint64],
        high: npt.NDArray[np.uint64],
        *,
        after: bytes,
        deadline: float,
    ) -> tuple[list[BlockAddress], bytes] | None:
        """A part of what it has in these arcs and the cursor for the next part (empty: no more).

        None in trouble. `after`: the cursor of the part before, empty at first.
        """
        ...

    async def moved(self, format_id: bytes, names: Sequence[BlockHash], *, deadline: float) -> bool:
        """Tell it that these blocks are with us now: it may drop those that the ring gives to others."""
        ...

    async def exchange_ring(self, *, deadline: float) -> Version | None:
        """Show it our ring and take its ring if that is newer; the version it has then. None in trouble."""
        ...


class Peers(Protocol):
    """All other nodes of the ring in force and of the one before."""

    def peer(self, node: NodeId) -> Peer | None:
        """None for ourselves and for nodes that no ring knows. Connections are made when first used."""
        ...

    def others(self) -> Sequence[Peer]:
        """Everyone of the ring in force but us."""
        ...


RingListener = Callable[[Ring, Ring | None], None]
"""Hears of a newly installed ring, and of the one before."""


class Rings(Protocol):
    """The ring in force on this node and the one before it."""

    @property
    def node(self) -> NodeId:
        """The id of this node."""
        ...

    @property
    def ring(self) -> Ring:
        """The ring in force. RuntimeError before there is one."""
        ...

    @property
    def previous(self) -> Ring | None:
        """The one before, while readers should still ask its owners; else None."""
        ...

    @property
    def earlier(self) -> Sequence[Ring]:
        """All rings before whose owners may still have what was not moved, `previous` first."""
        ...

    def install(self, state: RingState) -> bool:
        """Take a ring if its version is higher than ours: persist, tell listeners. False if it is not."""
        ...

    def listen(self, listener: RingListener) -> None:
        """Call `listener` after every installation."""
        ...


class Membership(Protocol):
    """Where nodes learn of each other and of rings: a static list, or Redis."""

    @property
    def trouble(self) -> str:
        """Empty, or one line: why this node lives on what it knew last."""
        ...

    async def start(self, rings: Rings, peers: Peers) -> None:
        """Begin; returns within a bound, once a ring is installed: of store, disk or list."""
        ...

    async def publish(self, state: RingState, *, replaces: Version) -> Version | None:
        """Make `state` the cluster's ring in place of `replaces`. None if it won, else what it lost to."""
        ...

    async def nodes(self) -> Mapping[NodeId, NodeSpec]:
        """Nodes that are there now, on the ring or not, as far as this kind of membership can tell."""
        ...

    async def close(self) -> None:
        """Say goodbye and let go of sockets."""
        ...


Spawn = Callable[[Awaitable[None]], None]
"""Runs a coroutine on the IO loop; whatever it raises is logged and counted, never lost."""
