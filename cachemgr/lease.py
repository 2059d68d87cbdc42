"""What callers hold: a lease on blocks they read, a reservation for a block they write."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.shard import BlockAddress


class SlotLease:
    """Pins slots, in chain order, until released.

    Releasing twice, or from two threads at once, unpins once.
    """

    __slots__ = ("_held", "_unpin", "hashes", "owner")

    def __init__(
        self,
        slots: list[int],
        hashes: Sequence[BlockHash],
        *,
        owner: object,
        unpin: Callable[[list[int]], None],
    ) -> None:
        self.hashes = hashes
        self.owner = owner
        self._held = [slots]
        self._unpin = unpin

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
        self._unpin(slots)


class Reservation:
    """A slot being written; its block is announced and not visible."""

    __slots__ = ("address", "hashes", "open", "payload", "slot")

    def __init__(
        self, slot: int, payload: npt.NDArray[np.uint8], *, address: BlockAddress, hashes: Sequence[BlockHash]
    ) -> None:
        self.slot = slot
        self.payload = payload
        self.address = address
        self.hashes = hashes
        self.open = True

    def close(self) -> None:
        """Commit and abort call this first. RuntimeError if one of them was called before."""
        if not self.open:
            raise RuntimeError("this block was committed or aborted before")
        self.open = False
