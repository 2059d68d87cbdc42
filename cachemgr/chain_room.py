"""A slot for the next block of a chain: a free one, or that of a block which should go for it.

No block goes for one that comes after it in its chain. What counts to another namespace goes without being
compared with the new block: how much each holds decides (eviction/ledger.py), not what a block is worth.

Threads: any; the lock is taken here.
"""

from collections.abc import Sequence
from typing import Final

from cachemgr.contract import BlockHash
from cachemgr.slot_state import SlotState

FULL: Final = -1
"""Nothing can go."""
OWN_CHAIN: Final = -3
"""What should go is an ancestor of the new block."""
_EXISTS: Final = -2
_DECLINED: Final = -4


def reserve_in_chain(
    state: SlotState,
    hashes: Sequence[BlockHash],
    index: int,
    *,
    namespace: str,
    declines: bool,
    refreshed: bool = False,
) -> int:
    """A slot for block `index`, reserved; below 0 why there is none.

    `declines`: a block that is worth less than what must go for it does not enter. `refreshed`: what is here
    of the chain was made the most recently used; whatever else may go is then looked at.
    """
    with state.lock:
        name = hashes[index]
        if state.exists(name):
            return _EXISTS
        number = state.shares.number_for(namespace, name) if state.shares.named else 0
        if not state.index.has_free() or (number and state.shares.ledger.at_quota(number)):
            if state.held_elsewhere(name):
                return _EXISTS
            refusal = _evict_for(state, hashes, index, number=number, declines=declines, refreshed=refreshed)
            if refusal:
                return refusal
        return state.reserve(name, number)


# Below: the lock is held.


def _evict_for(
    state: SlotState,
    hashes: Sequence[BlockHash],
    index: int,
    *,
    number: int,
    declines: bool,
    refreshed: bool,
) -> int:
    """Free one slot for block `index`, which counts to a number: 0, or why not."""
    own = state.shares.policy(number)
    if index and not _present(state, hashes[index - 1]):
        own.decline(hashes[index], depth=index)
        return FULL  # a block whose parent is missing cannot be found: nothing goes for its sake
    for policy in state.givers(number):
        if declines and policy is own and not _admits(state, hashes, index, number=number):
            state.counts.declined_blocks += 1
            return _DECLINED
        victim = policy.victim()
        if victim is not None and _is_before(state, victim, hashes, index):
            if not refreshed:
                return OWN_CHAIN
            oldest = policy.oldest()
            victim = next((slot for slot in oldest if not _is_before(state, slot, hashes, index)), None)
        if victim is not None:
            state.evict(victim, number=number)
            return 0
    return FULL


def _admits(state: SlotState, hashes: Sequence[BlockHash], index: int, *, number: int) -> bool:
    """True if block `index` is worth what would go for it of its own number."""
    before = state.index.find(hashes[index - 1]) if index else None
    if before is not None and state.shares.number_of(before) != number:
        before = None
    return state.shares.policy(number).admits(hashes[index], depth=index, parent=before)


def _is_before(state: SlotState, slot: int, hashes: Sequence[BlockHash], index: int) -> bool:
    """True if the slot holds a block of the chain before `index`."""
    depth, name = state.index.depth(slot), state.index.name(slot)
    return name is not None and depth < index and hashes[depth] == name


def _present(state: SlotState, name: BlockHash) -> bool:
    known = state.index.find(name) is not None or state.index.is_reserved(name)
    return known or state.held_elsewhere(name)
