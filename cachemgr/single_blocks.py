"""Blocks by name, in any order: what other nodes find, give and take away, behind the same lock as chains.

A node holds the segments that the ring gives it, so a block from elsewhere may come without its parent, and a
block may go whose children stay.

Invariants
- What is pinned stays; what is expired is not found.
- As everywhere: the lock is held for a slice of blocks at a time, and bytes are erased without it.

Threads: any.
"""

from collections.abc import Sequence

from cachemgr.contract import BlockHash
from cachemgr.shard import BlockAddress
from cachemgr.slot_state import SCATTERED, SlotState, slices


class SingleBlocks:
    """One face of the slots; the other is SlotTable, which also ends what begins here: `unpin`, `reject`."""

    def __init__(self, state: SlotState) -> None:
        self._state = state

    def missing(self, names: Sequence[BlockHash]) -> list[int]:
        """Which of `names` are neither here nor being written, ascending."""
        _, used_after = self._state.times()
        found: list[int] = []
        first = 0
        for part in slices(names, SCATTERED):
            with self._state.lock:
                find, is_reserved = self._state.find, self._state.index.is_reserved
                found += [
                    first + row
                    for row, name in enumerate(part)
                    if find(name, used_after=used_after) is None and not is_reserved(name)
                ]
            first += len(part)
        return found

    def uses(self, names: Sequence[BlockHash]) -> list[int]:
        """How often each was seen, made or used; of what went, as far as is remembered."""
        used: list[int] = []
        policies = 1 + len(self._state.shares.namespaces)  # each is asked for a block that went
        for part in slices(names, max(1, SCATTERED // policies)):
            with self._state.lock:
                find, order = self._state.index.find, self._state.order
                for name in part:
                    slot = find(name)
                    used.append(order.uses(name) if slot is None else order.seen(slot))
        return used

    def pin(self, names: Sequence[BlockHash]) -> list[int | None]:
        """Pin each that is here; its slot, or None. One in another process's arena only counts as used."""
        now, used_after = self._state.times()
        slots: list[int | None] = []
        for part in slices(names, SCATTERED):
            with self._state.lock:
                find, pin = self._state.find, self._state.pin
                for name in part:
                    slot = find(name, used_after=used_after)
                    if slot is not None:
                        pin(slot, now=now)
                    slots.append(slot)
        return slots

    def reserve(self, address: BlockAddress) -> int | None:
        """A slot for a block from elsewhere; None if it is here, being written, or nothing may go for it.

        What is worth least goes, as for any other; but not the one just before it, nor the front of
        its segment: without them it is worth less than they are. It is nobody's until somebody uses it.
        The slot may still carry what went for it: the caller erases that before it writes.
        """
        state = self._state
        with state.lock:
            if state.exists(address.hash) or state.held_elsewhere(address.hash):
                return None
            if not state.index.has_free():
                victims = (policy.victim() for policy in state.givers(0))
                victim = next((slot for slot in victims if slot is not None), None)
                if victim is None or state.index.name(victim) in (address.parent, address.segment):
                    state.counts.full_refusals += 1
                    return None
                state.evict(victim)
            return state.reserve(address.hash, 0)

    def publish(self, slot: int, address: BlockAddress) -> None:
        """The bytes of a slot reserved here are whole: let readers find them."""
        state = self._state
        now, _ = state.times()
        with state.lock:
            if state.closed:
                return
            if new := state.fulfil(slot, address, now=now, cheap=True):
                state.counts.received_blocks += 1
        if not new:
            state.erase_reserved(slot, address.hash)

    def drop(self, names: Sequence[BlockHash]) -> int:
        """Let go of those of ours that nobody reads; how many went."""
        state = self._state
        dropped = 0
        for part in slices(names, SCATTERED):
            gone: list[int] = []
            with state.lock:
                for name in part:
                    slot = state.index.find(name)
                    if slot is not None and slot in state.order:
                        state.order.forget(slot)
                        state.index.forget(slot)
                        gone.append(slot)
                state.counts.dropped_blocks += len(gone)
            state.erase_and_free(gone)
            dropped += len(gone)
        return dropped

    def found_at(self, names: Sequence[BlockHash], slots: Sequence[int]) -> list[int]:
        """Which rows of `names` are found in just that slot of ours, ascending."""
        _, used_after = self._state.times()
        found: list[int] = []
        for rows in slices(range(len(names))):
            with self._state.lock:
                index = self._state.index
                found += [
                    row
                    for row in rows
                    if index.find(names[row]) == slots[row] and index.last_used(slots[row]) > used_after
                ]
        return found
