"""Which block goes next when there is no room, and what is remembered of those that went.

How a cache uses it, all under one lock:

    policy.enter(slot, name, depth=…, parent=…, cheap=…)    a block was written; chains from the front
    policy.pin(slot)        … release(slot)                 it is used; deepest first when let go
    victim = policy.victim()                                no slot is free: this one may go …
    policy.evict(victim, name)                              … and does
    policy.forget(slot)                                     it goes otherwise: expired, corrupt, moved

`PolicyCache` in replay.py is the smallest such cache; `tensorcache simulate` replays traces through it.
"""

from cachemgr.eviction.adaptive import AdaptivePolicy
from cachemgr.eviction.contract import EvictionPolicy
from cachemgr.eviction.leaf_first_lru import LeafFirstLru
from cachemgr.eviction.replay import PolicyCache

__all__ = ["AdaptivePolicy", "EvictionPolicy", "LeafFirstLru", "PolicyCache"]
