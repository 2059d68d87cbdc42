"""Puts cached KV under a sequence before its prefill, and offers the blocks it makes to the cache.

What of a prompt of N tokens is not computed again, and where it comes from:

    blocks   0 ........ m ............ k ........ | tail |
             | in place | restored     | prefill         |     m: run in a retained lane, k: in the cache
    prefill starts at min(k · block_tokens, N − 2): the last two tokens always run: logits are wanted, and
    a step of two tokens has the same bits as any longer one.

For a sequence that was preempted, what was sampled before counts to the prompt.

Invariants
- A lease lives from `acquire` to `place` or `leave`, whatever happens between.
- A pending block is committed after its export or aborted, never left.
- Trouble in the cache is a miss: it is logged, counted in `cache_errors`, and the tokens are computed.

Threads: owned by the step loop.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from backend.generation import Generation
from backend.metrics import Reading
from backend.prefill_cost import PrefillCost
from backend.sequence import Sequence as Running
from backend.sequence import State
from cachemgr import BlockHash, PendingBlock, PrefixCache
from engines import Engine, EngineError, LaneId, LanePool

log = logging.getLogger(__name__)
T = TypeVar("T")


class RetainedLanes(Protocol):
    """The lane tier: which free lanes still hold the blocks of a finished sequence."""

    def retain(self, lane: int, hashes: Sequence[BlockHash], *, now: float) -> None:
        """The lane holds these blocks from position 0 on."""
        ...

    def match(self, hashes: Sequence[BlockHash], *, now: float) -> tuple[int, int] | None:
        """(lane, blocks) of the lane with the longest run of leading blocks in common; None without one."""
        ...

    def take(self, lane: int) -> None:
        """A retained lane is about to be written again."""
        ...

    def expire(self, now: float) -> list[int]:
        """Let go of lanes retained too long."""
        ...


class PrefixReuse:
    """Everything that moves KV between lanes and the cache for the sequences of one engine."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        *,
        lanes: LanePool,
        tier: RetainedLanes,
        cost: PrefillCost,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._lanes = lanes
        self._tier = tier
        self._cost = cost
        self._clock = clock
        self._block = engine.spec.block_tokens
        self.cache_errors = 0
        self.hit_tokens = {"lane": 0, "host": 0}

    def readings(self) -> list[Reading]:
        """Totals for the metrics page."""
        hits = [Reading("hit_tokens_total", float(tokens), tier) for tier, tokens in self.hit_tokens.items()]
        return [*hits, Reading("cache_errors_total", float(self.cache_errors))]

    def adopt(self, engine: Engine) -> None:
        """Move KV through `engine` from now on: it has the lanes, as they are."""
        self._engine = engine

    def acquire(self, seq: Running) -> None:
        """Ask for the known blocks of its tokens; an earlier lease is let go after the new one pins.

        What is elsewhere may take as long to come as computing what is not here would.
        """
        before, seq.lease = seq.lease, None
        if seq.hashes and seq.request.reads_cache:
            known = self._miss_on_error(lambda: self._cache.lookup(seq.hashes), 0)
            deadline = self._clock() + self._cost.seconds(seq.length - known * self._block)
            if seq.request.deadline is not None:
                deadline = min(deadline, seq.request.deadline)
            block_s = self._cost.seconds(self._block)
            seq.lease = self._miss_on_error(
                lambda: self._cache.acquire(
                    seq.hashes, deadline=deadline, block_s=block_s, namespace=seq.request.namespace
                ),
                None,
            )
        if before is not None:
            before.release()

    def place(self, seq: Running) -> bool:
        """Give the sequence a lane with as much of its prefix as is known; False if no lane is free.

        Raises EngineError when the engine cannot import; the lane is reserved then, `leave` gives it back.
        """
        known = seq.lease.blocks if seq.lease is not None else 0
        lane, in_place = self._reserve(seq, known)
        if lane is None:
            return False
        seq.lane = lane
        usable = max(in_place, self._restore(seq, lane, in_place))
        seq.kept = min(usable, known)  # blocks that only the lane had are offered to the cache again
        seq.written = seq.prefill_start = max(0, min(usable * self._block, seq.length - 2))
        seq.prefill_stop = seq.length
        if not seq.preemptions:  # what a preempted one finds of its own is no hit
            seq.cached_tokens = seq.written
            lane_tokens = min(in_place * self._block, seq.cached_tokens)
            self.hit_tokens["lane"] += lane_tokens
            self.hit_tokens["host"] += seq.cached_tokens - lane_tokens
        return True

    def keep(self, seq: Running) -> None:
        """Offer every whole block written since the last call. Raises EngineError if it cannot export."""
        full = seq.written // self._block
        first, seq.kept = seq.kept, max(seq.kept, full)
        if not seq.request.writes_cache or first >= full or seq.lane is None:
            return
        self._name_blocks(seq, full)
        if full <= len(seq.hashes):
            self._export(seq, seq.lane, range(first, full))

    def leave(self, seq: Running, *, retain: bool) -> None:
        """Let go of lease and lane; `retain` leaves the written blocks in the lane for whoever comes next."""
        if seq.lease is not None:
            seq.lease.release()
            seq.lease = None
        if seq.lane is None:
            return
        lane, seq.lane = seq.lane, None
        kept = retain and seq.request.writes_cache
        blocks = min(seq.written // self._block, len(seq.hashes)) if kept else 0
        if blocks:
            self._tier.retain(lane, seq.hashes[:blocks], now=self._clock())
        self._lanes.release(lane, retain=blocks > 0)

    def check_integrity(self, open_sequences: Sequence[Running]) -> None:
        """Prove that open sequences name their blocks by the tokens they hold, and hold no stray lease."""
        for seq in open_sequences:
            assert seq.lease is None or seq.state is State.LOADING, f"a lease in {seq.state}"
            if seq.hashes and not self.cache_errors:
                known = seq.tokens[: len(seq.hashes) * self._block]
                request = seq.request
                names = self._names(request, known)
                assert names == seq.hashes, "blocks are named after other tokens"

    def _reserve(self, seq: Running, known: int) -> tuple[LaneId | None, int]:
        """A lane, and how many leading blocks of the prompt it holds already.

        A retained lane is worth taking if it has blocks that the cache lost, or if it does not widen the span
        of lanes that every decode step covers; else copying the blocks into a nearer lane is cheaper.
        """
        now = self._clock()
        for expired in self._tier.expire(now):
            self._lanes.forget(LaneId(expired))
        retained = self._lanes.retained
        asks = bool(seq.hashes) and seq.request.reads_cache and bool(retained)
        match = self._tier.match(seq.hashes, now=now) if asks else None
        wanted = LaneId(match[0]) if match is not None else None
        if match is not None and match[1] <= known and self._lanes.widens(LaneId(match[0])):
            wanted = None
        lane = self._lanes.reserve(seq.room, prefer=wanted)
        if lane in retained:
            self._tier.take(lane)
        return lane, match[1] if match is not None and match[0] == lane else 0

    def _restore(self, seq: Running, lane: LaneId, first: int) -> int:
        lease, seq.lease = seq.lease, None
        if lease is None:
            return 0
        try:
            if lease.blocks <= first:
                return 0

            def sink(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
                self._engine.import_blocks(lane, blocks, payloads)

            return self._miss_on_error(lambda: self._cache.restore(lease, first=first, sink=sink), 0)
        finally:
            lease.release()

    def _name_blocks(self, seq: Running, full: int) -> None:
        """Extend the hash chain over sampled tokens; naming 32k tokens takes about a millisecond."""
        if full > len(seq.hashes):
            tokens = seq.tokens[: full * self._block]
            seq.hashes = self._miss_on_error(lambda: self._names(seq.request, tokens), seq.hashes)

    def _names(self, request: Generation, tokens: npt.NDArray[np.int64]) -> list[BlockHash]:
        """As the request was read: what became public since is not for it."""
        return self._cache.hashes(
            tokens, namespace=request.namespace, salt=request.cache_salt, public=request.public_blocks
        )

    def _export(self, seq: Running, lane: LaneId, blocks: range) -> None:
        pending: dict[int, PendingBlock] = {}
        try:
            for index in blocks:
                slot = self._prepare(seq, index)
                if slot is not None:
                    pending[index] = slot
            for run in _runs(pending):
                self._engine.export_blocks(lane, run, [pending[index].payload for index in run])
            for index in list(pending):
                self._commit(pending.pop(index))
        finally:
            for slot in pending.values():
                self._cache.abort(slot)

    def _prepare(self, seq: Running, index: int) -> PendingBlock | None:
        return self._miss_on_error(
            lambda: self._cache.prepare(seq.hashes, index, namespace=seq.request.namespace), None
        )

    def _commit(self, slot: PendingBlock) -> None:
        self._miss_on_error(lambda: self._cache.commit(slot), None)

    def _miss_on_error(self, call: Callable[[], T], miss: T) -> T:
        try:
            return call()
        except EngineError:
            raise
        except Exception:
            self.cache_errors += 1
            log.exception("cache call failed; treated as a miss")
            return miss


def _runs(indices: Sequence[int] | dict[int, PendingBlock]) -> list[range]:
    """Ascending indices as ranges without gaps."""
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
