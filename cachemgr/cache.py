"""The prefix cache of one engine identity: block names in, checked blocks out, from arenas of this host.

Read path: `lookup` / `acquire` find the longest known run and pin it → `restore` copies each block to
private memory in pieces, runs the tag over each piece while it is hot in the processor's cache, and hands
over only what passed. Write path: `prepare` reserves a slot, evicting if it must → the engine writes into
it → `commit` seals and publishes.

What other processes can write (the arena) is never handed over: only private copies whose check is done.

What is beyond this process is fetched by the `RemoteTiers` that `open_cache` was given: a lease that asks for
more than is here waits until they are done, or until its deadline. They hear of every block committed here.

Blocks in the arenas of the node's other processes are found behind our own and read through the same check;
what their writer changed meanwhile is a miss, counted as stale.

Threads: lookup, acquire, hashes and release by any; restore, prepare, commit, abort and close by the step
loop. One more thread looks after the arenas: about once a second it replaces what was deleted or cut, takes
over what fell free and, if anybody asked for blocks since, reads the headers that others published. It also
follows the tag secrets: a commit takes the one sealer or the other, each with nonces of its own.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cachemgr.arena_files import ArenaFiles
from cachemgr.block_hash import BlockHasher
from cachemgr.checked_copies import CheckedCopies
from cachemgr.contract import (
    BlockFormat,
    BlockHash,
    Lease,
    MemoryPins,
    NamespaceShare,
    PendingBlock,
    RemoteTiers,
    Sink,
)
from cachemgr.counts import Counts
from cachemgr.eviction import check_shares
from cachemgr.host_tier import HostTier
from cachemgr.lease import FetchingLease, Reservation, SlotLease
from cachemgr.no_pins import NoPins
from cachemgr.remote import NoRemoteTiers
from cachemgr.rotation import Rotation
from cachemgr.secrets import CacheSecrets
from cachemgr.settings import CacheSettings
from cachemgr.shard import ShardOpener, ShardSealer, address_of

if TYPE_CHECKING:
    from cachemgr.host_contract import HostStore

log = logging.getLogger(__name__)

_REFRESH_INTERVAL_S = 1.0

_REFRESH_SHARE = 50
"""Tending takes at most one part in so many of a processor, however large the arenas of others are."""


class HostCache:
    """PrefixCache over the host tier; build it with `open_cache`."""

    def __init__(
        self,
        block_format: BlockFormat,
        files: ArenaFiles,
        *,
        secrets: CacheSecrets,
        ttl_s: float,
        clock: Callable[[], float],
        pins: MemoryPins,
    ) -> None:
        self._format = block_format
        self._hasher = BlockHasher(block_format, secrets.naming)
        self._opener = ShardOpener(block_format, secrets.tags)
        self._sealer: ShardSealer | None = ShardSealer(block_format, secrets.tags)
        self._rotation = Rotation(secrets)
        self._copies = CheckedCopies(self._opener, payload_nbytes=block_format.payload_nbytes, pins=pins)
        self._files = files
        self._counts = Counts()
        self._clock = clock
        self._ttl_s = ttl_s
        self._pins = pins
        self._remote: RemoteTiers = NoRemoteTiers()
        self._changing = Lock()  # a new tier knows what is public, and who shares how
        self._shares: dict[str, NamespaceShare] = {}
        self._tier = self._new_tier()
        self._asked = False
        self._closed = Event()
        self._refresher = Thread(target=self._refresh_on, name="cache-arenas", daemon=True)
        if files.capacity:
            self._refresh_arenas()
            self._refresher.start()

    def hashes(
        self, tokens: npt.NDArray[Any], *, namespace: str, salt: str = "", public: int = 0
    ) -> list[BlockHash]:
        """See PrefixCache."""
        return self._hasher.hashes(tokens, namespace=namespace, salt=salt, public=public)

    def public_blocks(self, tokens: npt.NDArray[Any], *, salt: str = "") -> int:
        """See PrefixCache."""
        return self._hasher.public_blocks(tokens, salt=salt)

    def set_public(self, prefixes: Sequence[npt.NDArray[np.int64]]) -> None:
        """See PrefixCache."""
        with self._changing:
            self._hasher.set_public(prefixes)
            self._tier.table.set_public(self._hasher.public_names)

    def set_shares(self, shares: Mapping[str, NamespaceShare]) -> None:
        """See PrefixCache. ValueError for what cannot be kept; nothing has changed then."""
        check_shares(shares)
        with self._changing:
            self._shares = dict(shares)
            self._tier.table.set_shares(self._shares)

    def usage(self) -> Mapping[str, int]:
        """See PrefixCache."""
        return self._tier.table.usage()

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """See PrefixCache."""
        self._asked = True
        return self._tier.table.known(hashes)

    def acquire(
        self,
        hashes: Sequence[BlockHash],
        *,
        deadline: float | None,
        block_s: float | None = None,
        namespace: str = "",
    ) -> Lease:
        """See PrefixCache. The lease is ready at once unless there is more, and a place to fetch it from."""
        self._asked = True
        tier, remote, clock = self._tier, self._remote, self._clock
        tier.table.sweep()
        slots = tier.table.pin(hashes, namespace=namespace)
        if slots and remote.active:
            remote.used(hashes[: len(slots)])
        fetch = deadline is not None and len(slots) < len(hashes) and remote.active and clock() < deadline
        if deadline is None or not fetch:
            return SlotLease(slots, hashes[: len(slots)], owner=self, tier=tier)
        lease = FetchingLease(
            slots, hashes, owner=self, tier=tier, clock=clock, deadline=deadline, block_s=block_s,
            namespace=namespace,
        )  # fmt: skip
        lease.wait_for(remote)
        return lease

    def restore(self, lease: Lease, *, first: int, sink: Sink) -> int:
        """See PrefixCache. What the sink raises is engine trouble and passes through."""
        if not isinstance(lease, SlotLease) or lease.owner is not self:
            raise TypeError("restore takes a lease of this cache")
        if not lease.ready:
            raise RuntimeError("restore takes a lease that is ready: blocks of this one are on their way")
        if self._closed.is_set() or lease.tier is not self._tier:
            return first
        started = self._clock()
        usable = self._copies.restore(lease, first=first, sink=sink)
        self._counts.restored_blocks += usable - first
        self._counts.restore_seconds += self._clock() - started
        return usable

    def prepare(self, hashes: Sequence[BlockHash], index: int, *, namespace: str = "") -> PendingBlock | None:
        """See PrefixCache."""
        tier = self._tier
        slot = tier.table.reserve(hashes, index, namespace=namespace)
        if slot is None:
            return None
        address = address_of(hashes, index)
        arena = tier.begin(slot, address)
        if arena is None:
            return None
        return Reservation(slot, address=address, hashes=hashes, arena=arena, tier=tier)

    def commit(self, pending: PendingBlock) -> None:
        """See PrefixCache."""
        block = self._close_reservation(pending)
        if self._closed.is_set():
            return
        arena, table, sealer = block.arena, block.tier.table, self._sealer
        if block.tier is not self._tier or not arena.whole() or sealer is None:
            table.cancel(block.address.hash)
            return
        arena.publish(block.slot, sealer.seal(block.address, block.payload))
        table.publish(block.slot, block.address, block.hashes)
        self._remote.offer(block.hashes, block.address.index)

    def abort(self, pending: PendingBlock) -> None:
        """See PrefixCache."""
        block = self._close_reservation(pending)
        block.tier.table.cancel(block.address.hash)

    def counters(self) -> dict[str, float]:
        """Totals (`cache_…_total`) and gauges (every other name)."""
        return {**self._counts.totals(), **self._tier.gauges()}

    def close(self) -> None:
        """See PrefixCache."""
        if self._closed.is_set():
            return
        self._closed.set()
        remote, self._remote = self._remote, NoRemoteTiers()
        try:
            remote.close()
        finally:
            self._let_go()

    def reach_beyond(self, remote: "Callable[[HostStore], RemoteTiers]") -> None:
        """Use the tiers that `remote` makes of our store; `close` closes them. Before the first request."""
        from cachemgr.host_store import TierStore  # a cache that is alone does without the cluster's code

        self._remote = remote(TierStore(self._format, opener=self._opener, tier=lambda: self._tier))
        self._tier.table.declines = not self._remote.active

    def check_integrity(self) -> None:
        """AssertionError if index, order, pins and arenas contradict each other.

        O(n): for tests and idle checks.
        """
        self._tier.check_integrity()

    def _let_go(self) -> None:
        if self._refresher.ident is not None:
            self._refresher.join()
        self._tier.close()
        self._pins.close()
        self._files.close()

    def _refresh_arenas(self) -> None:
        """Let go of what is lost, take over what fell free, then see what others hold."""
        if lost := self._files.let_go_of_lost():
            self._start_over()
        for arena in self._files.claim():
            self._tier.attach(arena)
        self._counts.lost_arenas += lost  # last: who sees the count sees the new arena too
        asked, self._asked = self._asked, False
        self._tier.refresh(scan=asked)

    def _start_over(self) -> None:
        """With a new tier of the arenas that are left, if any; each lease of the old one is a miss."""
        self._tier.close()
        with self._changing:
            self._tier = self._new_tier()
        self._copies.warn_anew()  # a fresh arena may have the name of a lost one
        for arena in self._files.held:
            self._tier.attach(arena)

    def _new_tier(self) -> HostTier:
        tier = HostTier(
            self._files,
            opener=self._opener,
            ttl_s=self._ttl_s,
            clock=self._clock,
            counts=self._counts,
            pins=self._pins,
        )
        tier.table.declines = not self._remote.active
        tier.table.set_shares(self._shares)
        tier.table.set_public(self._hasher.public_names)
        return tier

    def _follow_secrets(self) -> None:
        """What opens first, so that nobody finds a block that was sealed with what he cannot open."""
        tags = self._rotation.look()
        if tags is not None:
            self._opener.use(tags)
            self._sealer = ShardSealer(self._format, tags) if tags else None

    def _refresh_on(self) -> None:
        """During a reload the process before us still holds its arena at first, and keeps committing."""
        arenas_due = 0.0
        while not self._closed.wait(_REFRESH_INTERVAL_S):
            self._take_care(self._follow_secrets)
            if time.monotonic() < arenas_due:
                continue
            started = time.thread_time()
            self._take_care(self._refresh_arenas)
            arenas_due = time.monotonic() + _REFRESH_SHARE * (time.thread_time() - started)

    def _take_care(self, look: Callable[[], None]) -> None:
        """The next round may do better: until then others' news are misses, and secrets stay as they were."""
        try:
            look()
        except OSError as error:
            log.warning("the files of the cache were not looked at: %s", error)
        except Exception:  # a fault of ours must not end the looking for good
            log.exception("the files of the cache were not looked at")

    def _close_reservation(self, pending: PendingBlock) -> Reservation:
        if not isinstance(pending, Reservation):
            raise TypeError("expected a block that prepare returned")
        pending.close()
        return pending


def open_cache(
    block_format: BlockFormat,
    settings: CacheSettings,
    secrets: CacheSecrets,
    *,
    clock: Callable[[], float] = time.monotonic,
    pins: MemoryPins | None = None,
    remote: "Callable[[HostStore], RemoteTiers] | None" = None,
) -> HostCache:
    """Open the host tier: take over what a process before left, reserve the rest.

    CacheError only for wrong settings. `pins` is closed with the cache. `remote` is called once, with the
    host tier as other nodes see it; what it returns is closed first of all when the cache closes.
    """
    files = ArenaFiles(block_format, settings)
    cache = HostCache(
        block_format, files, secrets=secrets, ttl_s=settings.ttl_s, clock=clock, pins=pins or NoPins()
    )
    if remote is not None:
        try:
            cache.reach_beyond(remote)
        except BaseException:
            cache.close()
            raise
    return cache
