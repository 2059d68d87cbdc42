"""The product's policy. (First version: leaf first along a chain, least recently used between chains.)"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.eviction.leaf_first_lru import LeafFirstLru


class AdaptivePolicy:
    """An EvictionPolicy for slots 0 … capacity − 1."""

    def __init__(self, capacity: int) -> None:
        self._order = LeafFirstLru(capacity)
        self._uses: dict[BlockHash, int] = {}

    def enter(
        self, slot: int, name: BlockHash, *, depth: int, parent: int | None, cheap: bool = False
    ) -> None:
        """See EvictionPolicy."""
        self._order.offer(slot, parent=parent)

    def enter_many(
        self, slots: npt.NDArray[np.int32], names: Sequence[BlockHash], depths: npt.NDArray[np.uint32]
    ) -> None:
        """See EvictionPolicy."""
        self._order.offer_many(slots)

    def enter_first(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._order.offer_first(slot)

    def pin(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._order.withdraw(slot)

    def release(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._order.offer(slot)

    def release_first(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._order.offer_first(slot)

    def victim(self) -> int | None:
        """See EvictionPolicy."""
        return self._order.victim()

    def evict(self, slot: int) -> None:
        """See EvictionPolicy."""
        self._order.withdraw(slot)

    def forget(self, slot: int) -> None:
        """See EvictionPolicy."""
        if slot in self._order:
            self._order.withdraw(slot)

    def uses(self, name: BlockHash) -> int:
        """See EvictionPolicy."""
        return self._uses.get(name, 0)

    def gauges(self) -> dict[str, float]:
        """See EvictionPolicy."""
        return {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._order
