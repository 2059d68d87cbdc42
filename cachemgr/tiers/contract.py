"""What a tier below the host tier promises: shards kept under their names, and brought back.

    door ── fetching ── LowerTier.known, get      of a prompt's blocks: what pays, from where
      └──── demotion ── LowerTier.put             of blocks made or used here: what is worth keeping

A tier keeps shards as they are: header, payload, the tag they were sealed with. What comes back is checked as
it arrives, against the address that was asked for, whatever the tier says it is.

Failure law: trouble is a miss and a counter. Nothing here raises for what a server, a disk or a file does.

Threads: the IO loop. What blocks (a disk) runs in the tier's own executor.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress


class LowerTier(Protocol):
    """Redis, or LMDB. Made and closed on the loop; used for any number of stores."""

    @property
    def name(self) -> str:
        """The `tier` label of its metrics: "redis" or "lmdb"."""
        ...

    @property
    def admit_seen(self) -> int:
        """How often a block must have been seen to be kept here (HostStore.uses)."""
        ...

    @property
    def usable(self) -> bool:
        """False while it is not worth asking: its breaker is open, its disk in trouble. Costs nothing."""
        ...

    async def start(self) -> None:
        """Begin; returns at once also where the server or the disk is not there: it is tried again later."""
        ...

    async def known(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> int:
        """How many leading ones of `blocks` it has, at most one exchange and no payload; 0 in trouble."""
        ...

    async def get(
        self,
        store: HostStore,
        blocks: Sequence[BlockAddress],
        *,
        deadline: float,
        arrived: Callable[[int], None],
    ) -> None:
        """Bring `blocks` into `store`, in order: each reserved, checked and published as it comes.

        `arrived(nbytes)` is called on the loop for each one published. Ends by `deadline` (monotonic), at the
        first block that it does not have, or when cancelled, at any moment, without harm to later calls.
        One that `store` would not take (None from `reserve`) is passed by. Wrong bytes are a miss, removed
        from the tier where Verdict.CORRUPT says so, and counted.
        """
        ...

    def put(self, store: HostStore, blocks: Sequence[BlockAddress]) -> None:
        """Keep these, which are in `store`, in the background; never waits.

        The queue is bounded, drops are counted. Blocks that are kept already cost next to nothing and count
        as used (a time to live begins anew). What is gone from `store` when its turn comes is passed by.
        """
        ...

    async def forget(self, store: HostStore) -> None:
        """`store` goes away: nothing here uses it when this returns.

        What waits of it to be kept is written first, as far as that takes no longer than a few seconds.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Totals (`…_total`) and gauges by metric name without the tier's: that is a label."""
        ...

    async def close(self) -> None:
        """Write what waits, within a bound; let go of sockets, files, threads. Idempotent."""
        ...
