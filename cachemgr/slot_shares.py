"""How namespaces share the slots: who has a share, what each holds, and what becomes theirs by use.

Invariants
- A namespace at its quota gets one more only for one of its own, however it comes by it.
- As everywhere: the lock is held for a slice at a time. Policies are made, and slots searched, without it.

Threads: any; callers of `set` wait for each other.
"""

from collections.abc import Mapping, Sequence
from threading import Lock

from cachemgr.contract import BlockHash, NamespaceShare
from cachemgr.eviction import Shares, check_shares
from cachemgr.other_blocks import FIRST_OTHER_SLOT
from cachemgr.slot_state import SlotState, slices

_CLAIMED_AT_ONCE = 16
"""Each may cost an eviction."""
_MOVED_AT_ONCE = 256
_TRIMMED_AT_ONCE = 8


class SlotShares:
    """One more face of the slots, beside SlotTable and SingleBlocks."""

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._setting = Lock()

    def set(self, shares: Mapping[str, NamespaceShare]) -> None:
        """See PrefixCache.set_shares. ValueError for what cannot be kept; nothing has changed then.

        Who is left out leaves before the others change: nothing is promised twice.
        """
        check_shares(shares)
        state, slots = self._state, self._state.shares
        with self._setting:
            for namespace in [known for known in slots.namespaces if known not in shares]:
                self._dismiss(namespace, slots)
            known = slots.namespaces
            new = {name: slots.new_policy(share) for name, share in shares.items() if name not in known}
            with state.lock:
                slots.name(shares, new)
                if not state.closed:
                    state.order = slots if slots.named else slots.common

    def set_public(self, names: frozenset[BlockHash]) -> None:
        """Blocks of these names are nobody's from now on, whoever makes or uses them."""
        with self._state.lock:
            self._state.shares.public = names

    def usage(self) -> Mapping[str, int]:
        """See PrefixCache.usage. Blocks that are being written for a namespace count."""
        state = self._state
        with state.lock:
            held = state.shares.ledger.held
            used = {namespace: held[number] for namespace, number in state.shares.namespaces.items()}
            return {**used, "": max(0, len(state.index) - sum(used.values()))}

    def claim(self, namespace: str, hashes: Sequence[BlockHash], slots: Sequence[int], *, front: int) -> None:
        """What is nobody's of a run that a lease of this namespace pins is its own from now on.

        `slots`: the run's, and `hashes` its names, from block `front` of the lease on. What is another's, or
        public, stays so.
        """
        if not self._state.shares.number(namespace):
            return
        for rows in slices(range(front, len(slots)), _CLAIMED_AT_ONCE):
            with self._state.lock:
                number = self._state.shares.number(namespace)
                if self._state.closed or not number:
                    return
                for row in rows:
                    after = slots[row - 1] if row else FIRST_OTHER_SLOT
                    self._claim(slots[row], hashes[row - front], number=number, after=after)

    def trim(self) -> None:
        """A few blocks of whoever holds more than its quota, because that was lowered, go."""
        state = self._state
        with state.lock:
            ledger = state.shares.ledger
            left = _TRIMMED_AT_ONCE
            for number in ledger.beyond_quota():
                while left and ledger.excess(number) > 0 and self._evict_own(number):
                    left -= 1

    def _dismiss(self, namespace: str, slots: Shares) -> None:
        """What a namespace holds is nobody's."""
        with self._state.lock:
            number = slots.leave(namespace)
        moved = slots.slots_of(number)
        for start in range(0, len(moved), _MOVED_AT_ONCE):
            with self._state.lock:
                slots.move(moved[start : start + _MOVED_AT_ONCE], number)
        with self._state.lock:
            slots.finish(number)

    # Below: the lock is held.

    def _claim(self, slot: int, name: BlockHash, *, number: int, after: int) -> None:
        shares = self._state.shares
        if (
            slot >= FIRST_OTHER_SLOT
            or shares.number_of(slot)
            or name in shares.public
            or self._state.index.name(slot) != name
        ):
            return
        if shares.ledger.at_quota(number) and not self._evict_own(number):
            return
        shares.claim(slot, name, number=number, after=after if after < FIRST_OTHER_SLOT else None)

    def _evict_own(self, number: int) -> bool:
        victim = self._state.shares.policy(number).victim()
        if victim is None:
            return False
        self._state.evict(victim, number=number)
        return True
