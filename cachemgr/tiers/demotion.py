"""What was made, used or fetched here is offered to the tiers below: each keeps what was seen often enough.

One way for all: runs of blocks wait in a queue, a turn of the loop takes a few of the first one, asks the
store how often they were seen, and gives each tier those that it admits. A chain of a thousand blocks that is
used again takes many turns, and nobody waits for it.

Promotion is the same: what came from a tier is in the host tier, and is offered to the tiers before that one.

Invariants
- No more than `_MOST_BLOCKS` wait; more are dropped and counted.
- A chain that waits to be offered whole is not queued again.

Threads: the IO loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress, address_of
from cachemgr.tiers.contract import LowerTier

log = logging.getLogger(__name__)

_TURN = 64
"""Blocks looked at before the loop turns."""

_MOST_BLOCKS = 65_536


@dataclass(slots=True, eq=False)
class _Run:
    """Blocks `at` … `end` − 1 wait to be offered to `tiers`."""

    store: HostStore
    tiers: Sequence[LowerTier]
    block: Callable[[int], BlockAddress]
    at: int
    end: int
    hashes: Sequence[BlockHash] | None = None
    """Of a chain whose blocks are committed one after the other: it may become longer while it waits."""
    used: BlockHash | None = None
    """Of a chain that is used again: its last block."""


class Demotion:
    """`tiers` in the order in which they are read."""

    def __init__(self, tiers: Sequence[LowerTier]) -> None:
        self._tiers = tiers
        self._waiting: deque[_Run] = deque()
        self._blocks = 0
        self._used: set[tuple[HostStore, BlockHash]] = set()
        self._turn: asyncio.Handle | None = None
        self._offered = {tier.name: 0 for tier in tiers}
        self._dropped = 0
        self._failed = 0
        self._closed = False

    def offer(self, store: HostStore, hashes: Sequence[BlockHash], index: int) -> None:
        """Block `index` of a chain was committed in `store`."""
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last.hashes is hashes and (last.store, last.end) == (store, index):
            if self._room(1):
                last.end += 1
        else:
            block = partial(address_of, hashes)
            self._add(_Run(store, self._tiers, block, index, index + 1, hashes=hashes))

    def used(self, store: HostStore, hashes: Sequence[BlockHash]) -> None:
        """A chain, from its front, was found in `store` and is used once more."""
        if not hashes or (store, hashes[-1]) in self._used:
            return
        run = _Run(store, self._tiers, partial(address_of, hashes), 0, len(hashes), used=hashes[-1])
        if self._add(run):
            self._used.add((store, hashes[-1]))

    def came(self, store: HostStore, blocks: Sequence[BlockAddress], tier: LowerTier) -> None:
        """Blocks came from a tier into `store`: to be offered to the tiers before it."""
        above = self._tiers[: self._tiers.index(tier)]
        if above:
            self._add(_Run(store, above, blocks.__getitem__, 0, len(blocks)))

    @property
    def idle(self) -> bool:
        """True if nothing waits."""
        return not self._waiting

    def counters(self) -> dict[str, dict[str, float]]:
        """By tier: totals, and how many blocks wait to be looked at."""
        return {
            name: {
                "tier_offered_blocks_total": float(offered),
                "tier_offers_dropped_total": float(self._dropped),
                "tier_offers_failed_total": float(self._failed),
                "tier_offers_waiting": float(self._blocks),
            }
            for name, offered in self._offered.items()
        }

    def forget(self, store: HostStore) -> None:
        """`store` goes away: what waits of it is offered now, and nothing later."""
        for run in [run for run in self._waiting if run.store is store]:
            self._waiting.remove(run)
            self._over(run)
            for start in range(run.at, run.end, _TURN):
                self._give(run, [run.block(index) for index in range(start, min(start + _TURN, run.end))])

    def close(self) -> None:
        """What waits is not offered any more. Idempotent."""
        self._closed = True
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._waiting.clear()
        self._used.clear()
        self._blocks = 0

    def _room(self, blocks: int) -> bool:
        if self._closed or self._blocks + blocks > _MOST_BLOCKS:
            self._dropped += blocks
            return False
        self._blocks += blocks
        return True

    def _add(self, run: _Run) -> bool:
        if not self._room(run.end - run.at):
            return False
        self._waiting.append(run)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._offer_some)
        return True

    def _over(self, run: _Run) -> None:
        """It waits no longer."""
        self._blocks -= run.end - run.at
        if run.used is not None:
            self._used.discard((run.store, run.used))

    def _offer_some(self) -> None:
        self._turn = None
        room = _TURN
        while self._waiting and room:
            run = self._waiting[0]
            end = min(run.end, run.at + room)
            blocks = [run.block(index) for index in range(run.at, end)]
            room -= len(blocks)
            self._blocks -= len(blocks)
            run.at = end
            if run.at == run.end:
                self._waiting.popleft()
                self._over(run)
            self._give(run, blocks)
        if self._waiting:
            self._turn = asyncio.get_running_loop().call_soon(self._offer_some)

    def _give(self, run: _Run, blocks: Sequence[BlockAddress]) -> None:
        try:
            uses = run.store.uses([block.hash for block in blocks])
            for tier in run.tiers:
                admitted = [
                    block for block, seen in zip(blocks, uses, strict=True) if seen >= tier.admit_seen
                ]
                if admitted:
                    tier.put(run.store, admitted)
                    self._offered[tier.name] += len(admitted)
        except Exception:  # our own bug, or a tier's: the others are still to be offered
            self._failed += len(blocks)
            log.exception("offering blocks to the tiers below failed")
