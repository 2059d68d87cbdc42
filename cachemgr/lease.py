"""What callers hold: a lease on blocks they read, a reservation for a block they write."""

from collections.abc import Sequence

from cachemgr.arena import Arena
from cachemgr.contract import BlockHash
from cachemgr.host_tier import HostTier
from cachemgr.shard import BlockAddress


class SlotLease:
    """Pins slots, in chain order, until released.

    Releasing twice, or from two threads at once, unpins once.
    """

    __slots__ = ("_held", "hashes", "owner", "tier")

    def __init__(
        self, slots: list[int], hashes: Sequence[BlockHash], *, owner: object, tier: HostTier
    ) -> None:
        self.hashes = hashes
        self.owner = owner
        self.tier = tier
        self._held = [slots]

    @property
    def blocks(self) -> int:
        """How many leading blocks of the asked chain are pinned."""
        return len(self.hashes)

    @property
    def ready(self) -> bool:
        """Always: without remote tiers nothing is ever on its way."""
        return True

    @property
    def slots(self) -> list[int]:
        """The pinned slots. RuntimeError once released."""
        if not self._held:
            raise RuntimeError("this lease was released: its blocks may be gone")
        return self._held[0]

    def release(self) -> None:
        """Unpin. Idempotent."""
        try:
            slots = self._held.pop()  # one bytecode under the interpreter lock: only one caller gets them
        except IndexError:
            return
        self.tier.table.unpin(slots)


class Reservation:
    """A slot being written; its block is announced and not visible."""

    __slots__ = ("address", "arena", "hashes", "open", "payload", "slot", "tier")

    def __init__(
        self,
        slot: int,
        *,
        address: BlockAddress,
        hashes: Sequence[BlockHash],
        arena: Arena,
        tier: HostTier,
    ) -> None:
        self.slot = slot
        self.payload = arena.payload(slot)
        self.address = address
        self.hashes = hashes
        self.arena = arena
        self.tier = tier
        self.open = True

    def close(self) -> None:
        """Commit and abort call this first. RuntimeError if one of them was called before."""
        if not self.open:
            raise RuntimeError("this block was committed or aborted before")
        self.open = False
