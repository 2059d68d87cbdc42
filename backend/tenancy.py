"""Tells every open cache which prefixes are public, and how namespaces share it; both change while it serves.

Threads: any. The lock orders changes against caches that are opened meanwhile; nothing waits under it but for
what a cache does with the news.
"""

import threading
from collections.abc import Mapping, Sequence
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from cachemgr import NamespaceShare, PrefixCache


class Tenancy:
    """What holds for all caches of a decoder, whichever release they belong to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caches: WeakSet[PrefixCache] = WeakSet()
        self._shares: Mapping[str, NamespaceShare] = {}
        self._public: Sequence[npt.NDArray[np.int64]] = ()

    @property
    def shares(self) -> Mapping[str, NamespaceShare]:
        """As they are now."""
        return self._shares

    def adopt(self, cache: PrefixCache) -> None:
        """A cache was opened: tell it now, and of every change until it is gone."""
        with self._lock:
            self._caches.add(cache)
            cache.set_shares(self._shares)
            cache.set_public(self._public)

    def set_shares(self, shares: Mapping[str, NamespaceShare]) -> None:
        """From now on namespaces share so."""
        with self._lock:
            self._shares = shares
            for cache in self._caches:
                cache.set_shares(shares)

    def set_public(self, prefixes: Sequence[npt.NDArray[np.int64]]) -> None:
        """From now on these prefixes are public."""
        with self._lock:
            self._public = prefixes
            for cache in self._caches:
                cache.set_public(prefixes)
