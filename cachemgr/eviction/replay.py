"""A cache that holds names only: drives the product's policy with the calls that the host tier makes."""

from collections.abc import Sequence

from cachemgr.contract import BlockHash
from cachemgr.eviction.adaptive import AdaptivePolicy


class PolicyCache:
    """`capacity` slots for names of blocks. One thread."""

    def __init__(self, capacity: int) -> None:
        self.policy = AdaptivePolicy(capacity)
        self._slots: dict[BlockHash, int] = {}
        self._names: list[BlockHash | None] = [None] * capacity
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
        if not self._free:
            admitted = self.policy.admits(name, depth=depth, parent=parent)
            if not admitted or not self._evict_for(names, depth):
                return None
        slot = self._free.pop()
        self._slots[name] = slot
        self._names[slot] = name
        self.policy.enter(slot, name, depth=depth, parent=parent)
        return slot

    def _evict_for(self, names: Sequence[BlockHash], depth: int) -> bool:
        """Free one slot for block `depth`; False if it would go at the cost of its own chain."""
        victim = self.policy.victim()
        before = names[:depth]
        if victim is not None and self._names[victim] in before:
            victim = next((slot for slot in self.policy.oldest() if self._names[slot] not in before), None)
        if victim is None:
            return False
        self.policy.evict(victim)
        name = self._names[victim]
        assert name is not None, "what may go has a name"
        del self._slots[name]
        self._names[victim] = None
        self._free.append(victim)
        return True
