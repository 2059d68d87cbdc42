"""Ours: the policy that runs in the product, by the very code that runs there."""

from cachemgr.contract import BlockHash
from scripts.simulate.contract import Cache


def ours(capacity: int) -> Cache[BlockHash]:
    """A cache that holds names only, under the product's policy; imported when it is wanted."""
    from cachemgr.eviction import PolicyCache

    return PolicyCache(capacity)
