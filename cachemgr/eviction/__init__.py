"""Which block goes next when there is no room, and what is remembered of those that went.

    contract      what a cache tells the policy, and asks of it
    adaptive      the product's policy: what enters, is used and goes, and so changes class
    ├ choice      the class whose least recent block is worth least, and there a leaf, goes first
    ├ admission   is a new block worth what must go for it?
    ├ slots       what is known of every slot, and the clock
    ├ classes     which blocks are alike in how soon they are asked for again
    ├ class_lists one list of slots per class
    ├ families    which block needs which, so that ends of chains go first
    ├ groups      which blocks are remembered as one
    ├ odds        what a block of a class and age is worth, learned from those that came back or did not
    └ ghosts      how often, and when, what went was seen; with `memory` its one keeper
    shares        namespaces that have a share of the slots, each with a policy of its own
    ├ ledger      how much each holds and may hold, and who gives a slot when there is no room
    └ handover    how a slot passes from one policy to another
    replay        the smallest cache around it: `tensorcache simulate` replays traces through this

How a cache uses it, all under one lock:

    policy.enter(slot, name, depth=…, parent=…, cheap=…)    a block was written; chains from the front
    policy.pin(slot)        … release(slot)                 it is used; deepest first when let go
    victim = policy.victim()                                no slot is free: this one may go …
    policy.evict(victim, name)                              … and does
    policy.admits(name, …)                                  asked before that: is the new block worth it?
    policy.forget(slot)                                     it goes otherwise: expired, corrupt, moved
"""

from cachemgr.eviction.adaptive import AdaptivePolicy
from cachemgr.eviction.contract import EvictionPolicy, SlotOrder
from cachemgr.eviction.ledger import check_shares
from cachemgr.eviction.replay import PolicyCache
from cachemgr.eviction.shares import Shares

__all__ = ["AdaptivePolicy", "EvictionPolicy", "PolicyCache", "Shares", "SlotOrder", "check_shares"]
