"""What whoever keeps blocks in numbered places asks of the policy that says which goes next."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash


class SlotOrder(Protocol):
    """What becomes of slots that may be evicted, and what is remembered of those that were.

    The caller guarantees: slots are numbered from 0 below `capacity`; a slot enters only while it is unknown;
    it is pinned only while it may go, and released only while pinned; it is told which slot was evicted or
    forgotten; the blocks of a chain enter front first and are released deepest first; calls are serialised by
    one lock.
    """

    def enter(self, slot: int, name: BlockHash, *, depth: int, parent: int | None, cheap: bool) -> None:
        """`slot` holds block `depth` of a chain from now on and may go, before that in `parent` may.

        `parent`: the slot of the block before it, None if it is not here. `cheap`: it need not be computed
        again if it goes, because it is found elsewhere.
        """
        ...

    def enter_many(
        self, slots: npt.NDArray[np.int32], names: Sequence[BlockHash], depths: npt.NDArray[np.uint32]
    ) -> None:
        """Distinct slots found written, nobody knows when: the first goes first, deepest blocks first."""
        ...

    def enter_first(self, slot: int) -> None:
        """`slot` holds what nobody here can read: it goes before everything else."""
        ...

    def pin(self, slot: int) -> None:
        """`slot` is being used and may not go."""
        ...

    def release(self, slot: int) -> None:
        """`slot` was used and may go again."""
        ...

    def renew(self, slot: int) -> None:
        """`slot` may go and is as if it had been used just now, but was not."""
        ...

    def release_first(self, slot: int) -> None:
        """`slot` may go again, and does so before everything else."""
        ...

    def evict(self, slot: int, name: BlockHash | None) -> None:
        """`slot` goes to make room, and its block is remembered by its name."""
        ...

    def forget(self, slot: int) -> None:
        """`slot`, pinned or not, goes for another reason, and is not remembered."""
        ...

    def seen(self, slot: int) -> int:
        """How often the block in `slot` was seen, made or used, as far as anybody remembers: 1 … 255."""
        ...

    def uses(self, name: BlockHash) -> int:
        """The same of a block that was evicted or declined; 0 if nobody remembers it.

        The first block of a group (groups.py) is remembered for all of them.
        """
        ...

    def gauges(self) -> dict[str, float]:
        """What the metrics page shows, by name."""
        ...

    def __contains__(self, slot: int) -> bool:
        """True if `slot` may go."""
        ...


class EvictionPolicy(SlotOrder, Protocol):
    """An order of slots, which says what goes next.

    The implementation must: answer in amortised O(log n) or better, never scan the resident blocks, and never
    name a slot that may not go.
    """

    def admits(self, name: BlockHash, *, depth: int, parent: int | None) -> bool:
        """True if a block is worth what must go for it. False: it is remembered, and not to be written.

        Asked only when there is no room, and only for blocks that can be computed again.
        """
        ...

    def decline(self, name: BlockHash, *, depth: int) -> None:
        """A block was seen and is not written, because the one before it was not."""
        ...

    def victim(self) -> int | None:
        """The slot that should go next; nothing changes. None if none may go."""
        ...

    def oldest(self) -> list[int]:
        """Slots that may go and were not used for long; whatever was not used for longest is among them."""
        ...
