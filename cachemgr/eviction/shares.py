"""Slots shared by namespaces: each that is named has a policy of its own, and a number; all else is number 0.

A block counts to whom it was made for. What is of number 0, because it was found at the start or came from
elsewhere, becomes a namespace's when that uses it; public blocks stay. All policies share one set of columns,
so a namespace costs memory for its odds and ghosts only, and a slot passes to another policy in place.

Invariants
- A slot that holds nothing, and is not being written, is of number 0.
- No family has slots of two numbers: within one, a block is never named while a block after it is here.

Threads: no lock inside; the cache's one lock guards every call, but where it says otherwise.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash, NamespaceShare
from cachemgr.eviction.adaptive import AdaptivePolicy
from cachemgr.eviction.contract import EvictionPolicy
from cachemgr.eviction.ledger import MOST_NAMED, Ledger
from cachemgr.eviction.slots import PolicySlots, SlotColumns

_MOST_ROOM = 8
"""A namespace's odds and ghosts are for at least this part of its quota: it may hold so much more."""


class Shares:
    """A SlotOrder that asks the policy of each slot. While no namespace is named, `common` alone will do."""

    def __init__(self, capacity: int) -> None:
        self._columns = SlotColumns(capacity, policies=MOST_NAMED + 1)
        self.common = AdaptivePolicy(capacity, PolicySlots(self._columns))
        self._policies = [self.common] * (MOST_NAMED + 1)
        self._number_column = np.zeros(capacity, np.uint8)
        self._number = self._number_column.data
        self._numbers: dict[str, int] = {}
        self._spare = list(range(MOST_NAMED, 0, -1))
        self._swept = 0
        self._leaving = 0
        """A number whose slots are being moved to number 0, and are in its lists already."""
        self._past_hits = 0.0
        self.ledger = Ledger()
        self.named = False
        """False: every slot is of number 0, and so is whoever asks."""
        self.public: frozenset[BlockHash] = frozenset()
        """Names of blocks that are nobody's."""

    # Who is named. One caller at a time; `new_policy` and `slots_of` are called without the lock.

    def number(self, namespace: str) -> int:
        """The number of a namespace; 0 if it is not named."""
        return self._numbers.get(namespace, 0)

    @property
    def namespaces(self) -> Mapping[str, int]:
        """Who is named, and their numbers."""
        return self._numbers

    def new_policy(self, share: NamespaceShare) -> tuple[int, AdaptivePolicy]:
        """A spare number, and a policy for a namespace that is going to have it."""
        number = self._spare.pop()
        capacity = self._columns.capacity
        room = int(capacity * max(share.min_share, share.quota / _MOST_ROOM))
        return number, AdaptivePolicy(capacity, PolicySlots(self._columns, number=number, room=room))

    def name(
        self, shares: Mapping[str, NamespaceShare], new: Mapping[str, tuple[int, AdaptivePolicy]]
    ) -> None:
        """These have shares from now on; `new` are those that had none. All others have left before."""
        for namespace, (number, policy) in new.items():
            self._numbers[namespace] = number
            self._policies[number] = policy
        self.ledger.name({self._numbers[namespace]: share for namespace, share in shares.items()})
        self.named = len(self._spare) < MOST_NAMED

    def leave(self, namespace: str) -> int:
        """All that a namespace has may go for others, as the least recent of number 0; its number.

        Its slots keep the number until `move`, and the number is in use until `finish`.
        """
        self._leaving = number = self._numbers.pop(namespace)
        self.ledger.unname(number)
        self.common.take_over(self._policies[number])
        return number

    def slots_of(self, number: int) -> npt.NDArray[np.intp]:
        """Slots of a number; O(capacity)."""
        return np.flatnonzero(self._number_column == number)

    def move(self, slots: npt.NDArray[np.intp], number: int) -> None:
        """Those of some slots that are still of the number that left are of number 0."""
        still = slots[self._number_column[slots] == number]
        self.common.adopt_many(still, source=self._policies[number])
        self._number_column[still] = 0
        self.ledger.held[number] -= len(still)

    def finish(self, number: int) -> None:
        """No slot has the number any more: it is spare."""
        self._past_hits += self._policies[number].gauges()["cache_ghost_hits_total"]
        self._policies[number] = self.common
        self._spare.append(number)
        self._leaving = 0
        self.named = len(self._spare) < MOST_NAMED

    # Whose a slot is.

    def number_for(self, namespace: str, name: BlockHash) -> int:
        """The number that a block counts to that is made for a namespace."""
        number = self._numbers.get(namespace, 0)
        return 0 if number and name in self.public else number

    def number_of(self, slot: int) -> int:
        """The number of a slot."""
        return self._number[slot]

    def policy(self, number: int) -> EvictionPolicy:
        """What says which slot of a number goes next."""
        return self._policies[number]

    def take(self, slot: int, number: int) -> None:
        """A block of a number is being written to a slot that held nothing."""
        self._number[slot] = number
        self._columns.state[slot] = 0
        self.ledger.held[number] += 1

    def let_go(self, slot: int) -> None:
        """A slot holds nothing any more."""
        number = self._number[slot]
        if number:
            self._number[slot] = 0
            self.ledger.held[number] -= 1

    def claim(self, slot: int, name: BlockHash, *, number: int, after: int | None) -> None:
        """A pinned slot of number 0 becomes another number's; `after`: the slot of the block before it."""
        if after is not None and self._number[after] != number:
            after = None
        self._policies[number].adopt(slot, name, source=self.common, after=after)
        self._number[slot] = number
        self.ledger.held[number] += 1

    def next_swept(self) -> EvictionPolicy:
        """Each policy in turn."""
        live = self._live()
        self._swept = (self._swept + 1) % len(live)
        return live[self._swept]

    def _live(self) -> list[AdaptivePolicy]:
        return [self.common, *(self._policies[number] for number in tuple(self._numbers.values()))]

    def check_integrity(self, used: set[int]) -> None:
        """AssertionError if the invariants are broken; `used`: slots that hold, or will hold, something."""
        numbers = self._number_column
        for number, held in enumerate(self.ledger.held):
            if number:
                assert held == np.count_nonzero(numbers == number), f"number {number} does not hold {held}"
        mine = np.flatnonzero(numbers).tolist()
        assert used.issuperset(mine), f"slots that hold nothing count: {set(mine) - used}"
        numbers = np.where(numbers == self._leaving, 0, numbers).astype(np.uint8)
        parents = np.frombuffer(self._columns.families.parent, np.int32)
        children = np.flatnonzero(parents >= 0)
        strange = children[numbers[children] != numbers[parents[children]]]
        assert not len(strange), f"slots come after those of another number: {strange.tolist()}"
        self._columns.lists.check_integrity(numbers)

    # As SlotOrder says.

    def enter(self, slot: int, name: BlockHash, *, depth: int, parent: int | None, cheap: bool) -> None:
        """See SlotOrder."""
        number = self._number[slot]
        if parent is not None and self._number[parent] != number:
            parent = None
        self._policies[number].enter(slot, name, depth=depth, parent=parent, cheap=cheap)

    def enter_many(
        self, slots: npt.NDArray[np.int32], names: Sequence[BlockHash], depths: npt.NDArray[np.uint32]
    ) -> None:
        """See SlotOrder. Nobody is known to hold them."""
        self.common.enter_many(slots, names, depths)

    def enter_first(self, slot: int) -> None:
        """See SlotOrder."""
        self.common.enter_first(slot)

    def pin(self, slot: int) -> None:
        """See SlotOrder."""
        self.common.pin(slot)  # leaving a list is the same in all policies

    def release(self, slot: int) -> None:
        """See SlotOrder."""
        self._policies[self._number[slot]].release(slot)

    def renew(self, slot: int) -> None:
        """See SlotOrder."""
        self._policies[self._number[slot]].renew(slot)

    def release_first(self, slot: int) -> None:
        """See SlotOrder."""
        self._policies[self._number[slot]].release_first(slot)

    def evict(self, slot: int, name: BlockHash | None) -> None:
        """See SlotOrder."""
        self._policies[self._number[slot]].evict(slot, name)
        self.let_go(slot)

    def forget(self, slot: int) -> None:
        """See SlotOrder."""
        self._policies[self._number[slot]].forget(slot)
        self.let_go(slot)

    def seen(self, slot: int) -> int:
        """See SlotOrder."""
        return self.common.seen(slot)

    def uses(self, name: BlockHash) -> int:
        """See SlotOrder. Nobody says whose it was: about a microsecond for each that is named."""
        return max(policy.uses(name) for policy in self._live())

    def gauges(self) -> dict[str, float]:
        """See SlotOrder; those of all policies together. Takes no lock."""
        each = [policy.gauges() for policy in self._live()]
        sums = {name: sum(gauges[name] for gauges in each) for name in each[0]}
        sums["cache_ghost_hits_total"] += self._past_hits
        return sums

    def __contains__(self, slot: int) -> bool:
        return slot in self.common
