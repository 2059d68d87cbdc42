"""Decides, step by step, which sequence waits, loads, prefills or decodes: continuous batching over lanes.

Requests are admitted first come, first served. A step decodes one token for every running sequence and
prefills at most `prefill_chunk_tokens` (more while nothing decodes), oldest sequence first: a long prompt
delays running streams by one chunk a step. Identical prefixes that arrive together are computed once:
whoever misses a block that another sequence is about to make stays LOADING until that block is committed or
its maker ends, and lets others pass meanwhile.

Invariants (`check_integrity` proves them when called)
- `_queue` holds the WAITING and LOADING sequences in order of arrival, `_running` those with a lane.
- `_making[h]` is a PREFILL sequence that will write block h of its prompt and has not kept it yet.
- Every sequence leaves through `end`, once, whatever the reason: lease and lane are free afterwards.

Threads: owned by the step loop; nothing here blocks, sleeps or knows of threads.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from backend.errors import Overloaded
from backend.metrics import Load, Reading
from backend.prefix_reuse import PrefixReuse
from backend.sequence import Sequence, State
from cachemgr import BlockHash
from engines import Engine, EngineError, EngineSpec, LanePool


class SchedulerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds the scheduler keeps. Chunks are tokens per step, `max_queue_size` is requests without a lane."""

    max_queue_size: int = 256
    prefill_chunk_tokens: int = 128
    idle_chunk_tokens: int = 256


@dataclass(slots=True)
class PrefillPart:
    """Tokens `start` … `stop` − 1 of a sequence's prompt, to be written in this step."""

    seq: Sequence
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """True when this part completes the prompt: its logits give the first token."""
        return self.stop == self.seq.prompt_tokens


@dataclass(slots=True)
class Plan:
    """One step: what to decode, what to prefill, and whom the engine failed while blocks were imported."""

    decodes: list[Sequence]
    prefills: list[PrefillPart]
    failed: list[tuple[Sequence, EngineError]] = field(default_factory=list)


class Scheduler:
    """The queue and the running sequences of one engine."""

    def __init__(
        self, spec: EngineSpec, lanes: LanePool, *, reuse: PrefixReuse, limits: SchedulerLimits
    ) -> None:
        self._spec = spec
        self._lanes = lanes
        self._reuse = reuse
        self._limits = limits
        self._queue: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._making: dict[BlockHash, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Sequences without a lane."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Sequences with a lane."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """True while any sequence is open."""
        return bool(self._queue or self._running)

    def open_sequences(self) -> list[Sequence]:
        """All sequences that have not ended, running ones first."""
        return [*self._running, *self._queue]

    def load(self) -> Load:
        """How busy this engine is."""
        unwritten = sum(max(0, seq.prompt_tokens - seq.written) for seq in self._running)
        return Load(
            requests_waiting=len(self._queue),
            requests_running=len(self._running),
            queued_prefill_tokens=unwritten + sum(seq.prompt_tokens for seq in self._queue),
            kv_tokens_used=sum(seq.written for seq in self._running),
            kv_tokens_capacity=self._spec.lanes * self._spec.max_seq_len,
        )

    def readings(self) -> list[Reading]:
        """Totals for the metrics page."""
        return self._reuse.readings()

    def adopt(self, engine: Engine) -> None:
        """Plan for `engine`, which took over the lanes; who owns which goes on."""
        self._spec = engine.spec
        self._reuse.adopt(engine)

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence. Raises Overloaded when `max_queue_size` others wait for a lane already.

        One that waited before is let in: the bound was kept when it came.
        """
        waited = seq.asked is not None and seq.asked.waited
        if len(self._queue) >= self._limits.max_queue_size + self._lanes.free and not waited:
            limit = self._limits.max_queue_size
            raise Overloaded(f"queue is full: {len(self._queue)} requests wait, max_queue_size is {limit}")
        self._queue.append(seq)

    def plan(self) -> Plan:
        """Admit who can be admitted, then say what the next step does."""
        plan = Plan([], [])
        if self._queue and self._lanes.free:
            self._admit(plan)
        plan.decodes = [seq for seq in self._running if seq.state is State.DECODE]
        prefilling = [seq for seq in self._running if seq.state is State.PREFILL]
        if prefilling:
            limits = self._limits
            alone = not plan.decodes
            self._divide(prefilling, limits.idle_chunk_tokens if alone else limits.prefill_chunk_tokens, plan)
        return plan

    def prefilled(self, part: PrefillPart) -> None:
        """The engine wrote `part`: offer its blocks; decoding follows the last one. May raise EngineError."""
        seq = part.seq
        seq.written = part.stop
        if part.last:
            seq.state = State.DECODE
        self._keep(seq)

    def decoded(self, seq: Sequence) -> None:
        """The engine wrote the last known token: offer the block it filled, if any. May raise EngineError."""
        seq.written += 1
        if seq.written % self._spec.block_tokens == 0:
            self._reuse.keep(seq)

    def end(self, seq: Sequence, *, retain: bool) -> None:
        """Close a sequence in any state; `retain` leaves its KV in the lane for reuse, if sound."""
        if seq.state is State.ENDED:
            return
        if seq.state in (State.WAITING, State.LOADING):
            self._queue.remove(seq)
        else:
            self._running.remove(seq)
        seq.state = State.ENDED
        self._forget_making(seq, seq.hashes)
        self._reuse.leave(seq, retain=retain)

    def withdraw(self) -> list[Sequence]:
        """Give back all sequences without a lane, oldest first, as if they had never been submitted."""
        queued = list(self._queue)
        for seq in queued:
            self.end(seq, retain=False)
        return queued

    def expired(self, now: float) -> list[Sequence]:
        """Open sequences whose deadline has passed."""
        return [
            seq
            for seq in self.open_sequences()
            if seq.request.deadline is not None and seq.request.deadline <= now
        ]

    def check_integrity(self) -> None:
        """Prove the invariants above: who owns which lane, what is awaited, whose blocks are named how."""
        lanes = [seq.lane for seq in self._running]
        assert None not in lanes, "a running sequence owns no lane"
        assert len(set(lanes)) == len(lanes) == self._lanes.active, (
            f"{self._lanes.active} reserved, owned {lanes}"
        )
        for seq in self._running:
            assert seq.state in (State.PREFILL, State.DECODE), f"running in {seq.state}"
            assert seq.written <= seq.length <= seq.tokens.shape[0], f"{seq.written} written of {seq.length}"
            assert seq.state is State.PREFILL or seq.written == seq.length - 1, (
                "more than one token unwritten"
            )
        for seq in self._queue:
            assert seq.state in (State.WAITING, State.LOADING), f"queued in {seq.state}"
            assert seq.lane is None, "a queued sequence owns a lane"
        makers = {seq.ticket for seq in self._running if seq.state is State.PREFILL}
        assert all(seq.ticket in makers for seq in self._making.values()), (
            "a block is awaited that nobody makes"
        )
        self._reuse.check_integrity(self.open_sequences())

    def _admit(self, plan: Plan) -> None:
        for seq in list(self._queue):
            if not self._lanes.free:
                return
            if self._loading(seq):
                continue
            try:
                placed = self._reuse.place(seq)
            except EngineError as error:
                plan.failed.append((seq, error))
                continue
            if not placed:
                return
            self._queue.remove(seq)
            seq.state = State.PREFILL
            self._running.append(seq)
            self._claim_making(seq)

    def _loading(self, seq: Sequence) -> bool:
        """True while the sequence has blocks worth waiting for; pins what is known on the way.

        A block that was awaited is asked for once more when nobody makes it any longer: it was committed,
        or its maker ended and this sequence computes it.
        """
        if not seq.hashes or not seq.request.reads_cache:
            return False
        if seq.state is State.WAITING:
            seq.state = State.LOADING
            self._reuse.acquire(seq)
        while seq.lease is not None:
            if not seq.lease.ready:
                return True
            missing = seq.hashes[seq.lease.blocks] if seq.lease.blocks < len(seq.hashes) else None
            if missing in self._making:
                seq.awaited = missing
                return True
            if seq.awaited is None:
                return False
            seq.awaited = None
            self._reuse.acquire(seq)
        return False

    def _divide(self, prefilling: Iterable[Sequence], budget: int, plan: Plan) -> None:
        """Oldest first. A part never leaves one token over for the next: two are the smallest step."""
        for seq in prefilling:
            left = seq.prompt_tokens - seq.written
            take = min(left, budget, self._spec.max_prefill_tokens)
            if left - take == 1:
                take += 1 if take == 2 else -1
            if take <= 0 or (take == 1 and left > 1):
                return
            plan.prefills.append(PrefillPart(seq, seq.written, seq.written + take))
            budget -= take

    def _keep(self, seq: Sequence) -> None:
        before = seq.kept
        try:
            self._reuse.keep(seq)
        finally:
            self._forget_making(seq, seq.hashes[before : seq.kept])

    def _claim_making(self, seq: Sequence) -> None:
        for block in seq.hashes[seq.kept :] if seq.request.writes_cache else ():
            self._making.setdefault(block, seq)

    def _forget_making(self, seq: Sequence, hashes: Iterable[BlockHash]) -> None:
        for block in hashes:
            if self._making.get(block) is seq:
                del self._making[block]
