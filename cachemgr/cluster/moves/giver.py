"""Gives blocks of this node to a peer that lacks them, at a pace, and says which of them it has then.

It is asked first what it has, so that bytes travel only where they are missing.

Threads: the IO thread.
"""

from collections.abc import Callable, Iterator, Sequence

from cachemgr.cluster.background import Pace
from cachemgr.cluster.contract import Peer
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress

LOOKUP_BLOCKS = 256
"""Names in one look-up."""

_BATCH_NBYTES = 4 << 20
_BATCH_BLOCKS = 64
_HELD_BLOCKS = 128
"""Pinned at once: the lock of a store is short only for few."""


class Giver:
    """`given` counts the copies that a peer took; one Giver per purpose, as each has its own pace."""

    def __init__(self, pace: Pace, *, call_s: float, clock: Callable[[], float]) -> None:
        self.given = 0
        self._pace = pace
        self._call_s = call_s
        self._clock = clock

    async def give(self, peer: Peer, store: HostStore, blocks: Sequence[BlockAddress]) -> list[bool]:
        """True for each block that the peer says it has, now or already. Stops once it is in trouble."""
        has: list[bool] = []
        for first in range(0, len(blocks), LOOKUP_BLOCKS):
            asked = blocks[first : first + LOOKUP_BLOCKS]
            names = [block.hash for block in asked]
            deadline = self._clock() + self._call_s
            found = await peer.lookup(store.format_id, names, deadline=deadline)
            if not peer.usable:
                break
            there = [at is not None for at in found]
            lacking = [index for index, at in enumerate(there) if not at]
            for batch in batches(lacking, store.payload_nbytes):
                taken = await self._put(peer, store, [names[index] for index in batch])
                for index, took in zip(batch, taken, strict=True):
                    there[index] = took
            has += there
        return has + [False] * (len(blocks) - len(has))

    async def _put(self, peer: Peer, store: HostStore, names: list[BlockHash]) -> list[bool]:
        if not peer.usable:
            return [False] * len(names)
        await self._pace.spend(len(names) * store.payload_nbytes)
        taken = await peer.put(store, names, deadline=self._clock() + self._call_s)
        self.given += sum(taken)
        return taken


def addresses_of(store: HostStore, names: Sequence[BlockHash]) -> list[BlockAddress]:
    """Of those of `names` that are published here."""
    here: list[BlockAddress] = []
    for first in range(0, len(names), _HELD_BLOCKS):
        held = [shard for shard in store.hold(names[first : first + _HELD_BLOCKS]) if shard is not None]
        here += [shard.address for shard in held]
        store.let_go(held)
    return here


def batches(indices: Sequence[int], payload_nbytes: int) -> Iterator[Sequence[int]]:
    """`indices` in runs that one transfer takes: bounded in blocks and bytes, but at least one block."""
    size = max(1, min(_BATCH_BLOCKS, _BATCH_NBYTES // payload_nbytes))
    for first in range(0, len(indices), size):
        yield indices[first : first + size]
