"""Every cache of a decoder hears what is public and who has which share, whenever it is opened."""

import gc

import numpy as np

from backend.tenancy import Tenancy
from cachemgr import NamespaceShare
from tests.backend.doubles import DictCache


class ToldCache(DictCache):
    """Remembers the last it was told."""

    def __init__(self):
        super().__init__()
        self.told = {}

    def set_shares(self, shares):
        self.told["shares"] = dict(shares)

    def set_public(self, prefixes):
        self.told["public"] = [list(prefix) for prefix in prefixes]


def test_a_cache_hears_what_holds_already_and_every_change():
    tenancy, early, late = Tenancy(), ToldCache(), ToldCache()
    shares, prefix = {"a": NamespaceShare(quota=0.5)}, np.arange(3)
    tenancy.adopt(early)
    assert early.told == {"shares": {}, "public": []}
    tenancy.set_shares(shares)
    tenancy.set_public([prefix])
    tenancy.adopt(late)
    assert early.told == late.told == {"shares": shares, "public": [[0, 1, 2]]}
    tenancy.set_public([])
    tenancy.set_shares({})
    assert early.told == late.told == {"shares": {}, "public": []}


def test_a_cache_that_is_gone_is_not_kept():
    tenancy = Tenancy()
    cache = ToldCache()
    tenancy.adopt(cache)
    told = cache.told
    del cache
    gc.collect()
    tenancy.set_shares({"a": NamespaceShare()})
    assert told == {"shares": {}, "public": []}
