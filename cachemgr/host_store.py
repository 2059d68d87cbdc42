"""The host tier as other nodes see it: single blocks held, received, listed and dropped.

Giving:     `hold` pins → the bytes are sent from the arena → `let_go`.
Receiving:  `reserve` → the bytes come into the slot → `check`, fed with each piece → `publish` or `abort`.

Shards keep the header they were sealed with, on whatever node they are.

Invariants
- A held or an incoming shard belongs to one HostTier. When that is replaced, because an arena was lost, the
  shard is a miss: a held one gives bytes that pass no check, an incoming one is not published.
- A shard of ours is pinned while it is held. One in the arena of another process of the node is not: its
  writer may reuse the slot at any moment, and the check of what was read decides.

Threads: any. Nothing waits for more than the cache's one lock, and no bytes are touched under it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from cachemgr.arena import Arena, ArenaView
from cachemgr.contract import BlockFormat, BlockHash
from cachemgr.host_contract import ArenaPlace, HeldShard, IncomingShard
from cachemgr.host_tier import HostTier
from cachemgr.shard import (
    BlockAddress,
    ShardCheck,
    ShardOpener,
    Verdict,
    address_in,
    format_id,
)


class HeldSlot:
    """A HeldShard."""

    __slots__ = ("_arena", "_held", "address", "header", "slot", "tier")

    def __init__(
        self, slot: int, *, address: BlockAddress, header: bytes, arena: ArenaView, tier: HostTier
    ) -> None:
        self.slot = slot
        self.address = address
        self.header = header
        self.tier = tier
        self._arena = arena
        self._held = [slot]

    @property
    def payload(self) -> memoryview:
        """See HeldShard. Of a lost arena: zeros."""
        if not self._held:
            raise RuntimeError("this shard was let go: its bytes may be another block's")
        source = self._arena.payload(self.slot)  # a reference that keeps the map from closing
        if not len(source) or not self._arena.whole():
            source = np.zeros(self._arena.payload_nbytes, np.uint8)
        return source.data.toreadonly()

    @property
    def place(self) -> ArenaPlace:
        """See HeldShard."""
        device, inode = self._arena.file_id
        return ArenaPlace(self._arena.path, device, inode, self._arena.offset(self.slot))

    @property
    def held(self) -> bool:
        """False once it was let go."""
        return bool(self._held)

    def let_go(self) -> list[int]:
        """The slot to unpin; nothing the second time."""
        try:
            return [self._held.pop()]  # one bytecode under the interpreter lock: only one caller gets it
        except IndexError:
            return []


class IncomingSlot:
    """An IncomingShard."""

    __slots__ = ("_payload", "address", "arena", "slot", "tier")

    def __init__(self, slot: int, *, address: BlockAddress, arena: Arena, tier: HostTier) -> None:
        self.slot = slot
        self.address = address
        self.arena = arena
        self.tier = tier
        self._payload = [arena.payload(slot).data]

    @property
    def payload(self) -> memoryview:
        """See IncomingShard. RuntimeError once published or aborted."""
        if not self._payload:
            raise RuntimeError("this shard was published or aborted: its slot is not to be written any more")
        return self._payload[0]

    def close(self) -> None:
        """Publish and abort call this first. RuntimeError if one of them was called before."""
        try:
            self._payload.pop()
        except IndexError:
            raise RuntimeError("this shard was published or aborted before") from None


class TierStore:
    """HostStore over whatever `tier` answers at each call."""

    def __init__(
        self, block_format: BlockFormat, *, opener: ShardOpener, tier: Callable[[], HostTier]
    ) -> None:
        self.format_id = format_id(block_format)
        self.payload_nbytes = block_format.payload_nbytes
        self._opener = opener
        self._tier = tier

    @property
    def blocks(self) -> int:
        """See HostStore."""
        return int(self._tier().table.gauges()["cache_resident_blocks"])

    def missing(self, hashes: Sequence[BlockHash]) -> list[int]:
        """See HostStore."""
        return self._tier().table.single.missing(hashes)

    def uses(self, names: Sequence[BlockHash]) -> list[int]:
        """See HostStore."""
        return self._tier().table.single.uses(names)

    def hold(self, names: Sequence[BlockHash]) -> list[HeldShard | None]:
        """See HostStore."""
        tier = self._tier()
        slots = tier.table.single.pin(names)
        return [
            self._held(slot, name, tier) if slot is not None else None
            for name, slot in zip(names, slots, strict=True)
        ]

    def let_go(self, shards: Sequence[HeldShard]) -> None:
        """See HostStore. The front of a chain is then more recently used than its end."""
        slots: dict[HostTier, list[int]] = {}
        for shard in sorted(map(_slot_of, shards), key=lambda shard: shard.address.index):
            slots.setdefault(shard.tier, []).extend(shard.let_go())
        for tier, of_tier in slots.items():
            tier.table.unpin(of_tier)

    def reserve(self, address: BlockAddress) -> IncomingShard | None:
        """See HostStore."""
        tier = self._tier()
        slot = tier.table.single.reserve(address)
        if slot is None:
            return None
        arena = tier.begin(slot, address)
        if arena is None:
            return None
        incoming = IncomingSlot(slot, address=address, arena=arena, tier=tier)
        return incoming if incoming.payload.nbytes else None  # empty: the cache was closed just now

    def check(self, header: bytes, address: BlockAddress) -> ShardCheck | Verdict:
        """See HostStore."""
        return self._opener.begin(header, address)

    def publish(self, shard: IncomingShard, header: bytes) -> None:
        """See HostStore. ValueError, and the slot is given back, if the header is another block's."""
        incoming = _closed(shard)
        tier, arena, address = incoming.tier, incoming.arena, incoming.address
        fits = address_in(header) == address
        if not fits or tier is not self._tier() or not arena.whole():
            tier.table.cancel(address.hash)
            if not fits:
                raise ValueError("a shard is published under the header that was checked for its address")
            return
        arena.publish(incoming.slot, header)
        tier.table.single.publish(incoming.slot, address)

    def abort(self, shard: IncomingShard) -> None:
        """See HostStore."""
        incoming = _closed(shard)
        incoming.tier.table.cancel(incoming.address.hash)

    def reject(self, shard: HeldShard, verdict: Verdict) -> None:
        """See HostStore. Nothing if it was let go meanwhile."""
        held = _slot_of(shard)
        if held.held:
            held.tier.table.reject(held.slot, held.address.hash, verdict)

    def resident(self, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> list[BlockAddress]:
        """See HostStore."""
        tier = self._tier()
        return [address for arena in tier.arenas for address in self._resident(tier, arena, low, high)]

    def drop(self, names: Sequence[BlockHash]) -> int:
        """See HostStore."""
        return self._tier().table.single.drop(names)

    def _held(self, slot: int, name: BlockHash, tier: HostTier) -> HeldShard | None:
        """A pinned slot as a shard; None, and the slot let go, if its bytes are not what the index says."""
        arena = tier.holder(slot)
        header = arena.header(slot) if arena is not None and arena.whole() else b""
        address = address_in(header)
        if arena is not None and address is not None and address.hash == name:
            return HeldSlot(slot, address=address, header=header, arena=arena, tier=tier)
        tier.table.reject(slot, name, Verdict.CORRUPT)
        tier.table.unpin([slot])
        return None

    def _resident(
        self, tier: HostTier, arena: Arena, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]
    ) -> list[BlockAddress]:
        if not len(low) or not arena.whole():
            return []
        headers = arena.headers()
        positions = np.ascontiguousarray(headers["segment"]).view("<u8")[::2]
        arcs = np.searchsorted(low, positions, side="right") - 1
        inside = (arcs >= 0) & (positions <= high[arcs])
        rows = np.flatnonzero(inside & self._opener.readable(headers))
        names: list[BlockHash] = headers["hash"][rows].tolist()
        rows = rows[tier.table.single.found_at(names, (arena.slots.start + rows).tolist())]
        columns = [headers[field][rows].tolist() for field in ("hash", "parent", "segment", "index")]
        return list(map(BlockAddress, *columns))


def _slot_of(shard: HeldShard) -> HeldSlot:
    if not isinstance(shard, HeldSlot):
        raise TypeError("expected a shard that hold returned")
    return shard


def _closed(shard: IncomingShard) -> IncomingSlot:
    if not isinstance(shard, IncomingSlot):
        raise TypeError("expected a shard that reserve returned")
    shard.close()
    return shard
