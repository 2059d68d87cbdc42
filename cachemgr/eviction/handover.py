"""How slots pass from one policy to another that shares their columns: one by one in use, or all there are.

A block that changes hands keeps how often it was seen. Its life in the old policy's odds ends, and one in the
new one's begins: each counts its own uses, so times of one mean nothing to the other.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.eviction.odds import AGES
from cachemgr.eviction.slots import LEADS, LIST, LOW, OF_LIST, PolicySlots

_CLASS_OF_LIST: Final = np.array(OF_LIST, np.int64)


def hand_over(
    slot: int, name: BlockHash, *, source: PolicySlots, target: PolicySlots, after: int | None
) -> None:
    """A slot in use becomes `target`'s, and comes after another one of its; None: what it follows is not.

    It leaves its family: no tree has slots of two policies. `target` begins to follow its life when it is
    released.
    """
    state = source.state[slot]
    if state & LEADS:
        source.odds.end(OF_LIST[state & LIST], source.epoch_of(slot), returned=True)
    source.families.leave(slot)
    if after is not None:
        target.families.join(slot, after)
    elif not state & LEADS:
        state |= LEADS
        target.groups.places[slot] = 0
    if state & LEADS:
        seen, _ = target.memory.come_back(name)
        target.counts[slot] = max(target.counts[slot], seen)
    target.state[slot] = state
    target.used[slot] = (target.uses - AGES * target.epoch_length) & LOW  # too old to be followed until then
    target.cheap_entered = target.cheap_entered or source.cheap_entered


def move_lives(slots: npt.NDArray[np.intp], *, source: PolicySlots, target: PolicySlots) -> None:
    """Some slots of `source`, whose lists `target` took over, are followed by `target` from now on."""
    ages = np.uint32(source.uses & LOW) - source.used_column[slots]
    target.used_column[slots] = np.uint32(target.uses & LOW) - ages
    states = source.state_column[slots]
    epochs = (target.uses - ages.astype(np.int64)) // target.epoch_length
    alive = (states & LEADS != 0) & (target.epoch - epochs < AGES)
    target.odds.begin_many(_CLASS_OF_LIST[states[alive] & LIST], epochs[alive])
