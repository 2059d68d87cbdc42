"""A cache that holds names only: drives the product's policy with the calls that the host tier makes."""

from collections.abc import Sequence

from cachemgr.contract import BlockHash
from cachemgr.eviction.adaptive import AdaptivePolicy


class PolicyCache:
    """`capacity` slots for names of blocks. One thread."""

    def __init__(self, capacity: int) -> None:
        self.policy = AdaptivePolicy(capacity)
        self._slots: dict[BlockHash, int] = {}
        self._names = [BlockHash(b"")] * capacity
        self._depths = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def request(self, names: Sequence[BlockHash]) -> int:
        """A prompt whose blocks have these names, front first, comes and is computed; how many were here."""
        hit = self._run(names)
        for slot in hit:
            self.policy.pin(slot)
        for slot in reversed(hit):
            self.policy.release(slot)
        parent = hit[-1] if hit else None
        for depth in range(len(hit), len(names)):
            parent = self._insert(names, depth, parent)
            if parent is None:
                for refused in range(depth + 1, len(names)):
                    self.policy.decline(names[refused], depth=refused)
                break
        return len(hit)

    def _run(self, names: Sequence[BlockHash]) -> list[int]:
        """Slots of the longest leading run that is here."""
        slots: list[int] = []
        for name in names:
            slot = self._slots.get(name)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _insert(self, names: Sequence[BlockHash], depth: int, parent: int | None) -> int | None:
        """Write block `depth`; its slot, None if nothing may go for it."""
        name = names[depth]
        slot = self._slots.get(name)
        if slot is not None:
            return slot  # left behind a gap that is now closed
        if self._free:
            slot = self._free.pop()
        elif not self.policy.admits(name, depth=depth, parent=parent):
            return None
        else:
            slot = self.policy.victim()
            if slot is not None and self._depths[slot] < depth and self._is_before(slot, names, depth):
                slot = self._other_than(names, depth)
            if slot is None:
                return None
            gone = self._names[slot]
            self.policy.evict(slot, gone)
            del self._slots[gone]
        self._slots[name] = slot
        self._names[slot] = name
        self._depths[slot] = depth
        self.policy.enter(slot, name, depth=depth, parent=parent)
        return slot

    def _other_than(self, names: Sequence[BlockHash], depth: int) -> int | None:
        """What may go for block `depth` and is not of its own chain."""
        others = (slot for slot in self.policy.oldest() if not self._is_before(slot, names, depth))
        return next(others, None)

    def _is_before(self, slot: int, names: Sequence[BlockHash], depth: int) -> bool:
        """True if `slot` holds a block of this chain before `depth`."""
        at = self._depths[slot]
        return at < depth and names[at] == self._names[slot]
