"""What the parts of a cluster node promise each other: stores, peers, the ring in force, membership.

    fetcher, replicator, mover          decide which block should be where
      │            │
      ▼            ▼
    Peers        HostStore              the other nodes; the host tier of this one, per block format
      │
      ▼
    control (gRPC), bulk channel        what travels

`HostStore` is that of cachemgr.host_contract. Everything here belongs to the IO thread (T3) and its asyncio
loop. A position on the ring is that of a segment: all blocks of a segment live together. The ring is no
matter of safety: nodes that disagree about it miss blocks, and never read wrong ones.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId, NodeSpec, Ring, RingState, Version
from cachemgr.shard import BlockAddress


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
