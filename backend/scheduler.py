"""Decides, step by step, which sequence waits, loads, prefills or decodes: continuous batching over lanes.

Requests of one principal are admitted first come, first served, and principals in turn (see `turns`). While
another principal waits for a lane, one holds at most half of them: what it holds beyond is preempted, waits
in front of its principal's line, and goes on with all its tokens when its turn comes. A principal alone has
all lanes.

A step decodes one token for every running sequence and prefills at most `prefill_chunk_tokens` (more while
nothing decodes), the principals in turn, oldest sequence first: a long prompt delays running streams by one
chunk a step. Identical prefixes that arrive together are computed once: whoever misses a block that another
sequence is about to make stays LOADING until that block is committed or its maker ends, and lets others pass
meanwhile.

Invariants (`check_integrity` proves them when called)
- `_turns` holds the WAITING and LOADING sequences, `_running` those with a lane, in the order they got it.
- `_making[h]` is a PREFILL sequence that will write block h of its tokens and has not kept it yet.
- Only who holds fewer than half of the lanes takes one from another, and whoever was preempted waits while
  such a principal does: two never take the same lane from each other.
- Every sequence leaves through `end`, once, whatever the reason: lease and lane are free afterwards.

Threads: owned by the step loop; nothing here blocks, sleeps or knows of threads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

import msgspec

from backend.deadlines import Deadlines
from backend.errors import Overloaded
from backend.metrics import Load, Reading
from backend.preemption import choose
from backend.prefix_reuse import PrefixReuse
from backend.sequence import Sequence, State
from backend.turns import Line, Turns
from cachemgr import BlockHash
from engines import Engine, EngineError, EngineSpec, LanePool

LOADING_AT_ONCE = 64
"""So many sequences of one principal pin blocks and are looked at while they wait for them."""


class SchedulerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds the scheduler keeps. Chunks are tokens per step, `max_queue_size` is requests without a lane."""

    max_queue_size: int = 256
    prefill_chunk_tokens: int = 128
    idle_chunk_tokens: int = 256


@dataclass(slots=True)
class PrefillPart:
    """Tokens `start` … `stop` − 1 of a sequence, known before it got its lane, to be written in this step."""

    seq: Sequence
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """True when this part completes the prefill: its logits give the next token."""
        return self.stop == self.seq.prefill_stop


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
        self._half = max(1, spec.lanes // 2)
        self._turns = Turns(self._half)
        self._deadlines = Deadlines()
        self._preemptions = 0
        self._running: list[Sequence] = []
        self._making: dict[BlockHash, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Sequences without a lane."""
        return self._turns.waiting

    @property
    def running(self) -> int:
        """Sequences with a lane."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """True while any sequence is open."""
        return bool(self._turns.waiting or self._running)

    def open_sequences(self) -> list[Sequence]:
        """All sequences that have not ended, running ones first."""
        return [*self._running, *self._turns]

    def load(self) -> Load:
        """How busy this engine is."""
        unwritten = sum(max(0, seq.prefill_stop - seq.written) for seq in self._running)
        return Load(
            requests_waiting=self._turns.waiting,
            principals_waiting=self._turns.principals,
            requests_running=len(self._running),
            queued_prefill_tokens=unwritten + sum(seq.length for seq in self._turns),
            kv_tokens_used=sum(seq.written for seq in self._running),
            kv_tokens_capacity=self._spec.lanes * self._spec.max_seq_len,
        )

    def readings(self) -> list[Reading]:
        """Totals for the metrics page."""
        return [*self._reuse.readings(), Reading("preemptions_total", float(self._preemptions))]

    def adopt(self, engine: Engine) -> None:
        """Plan for `engine`, which took over the lanes; who owns which goes on."""
        self._spec = engine.spec
        self._reuse.adopt(engine)

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence. Raises Overloaded when `max_queue_size` others wait for a lane already.

        One that waited before is let in: the bound was kept when it came. So is one of a principal that has
        fewer waiting than half of the lanes, where others fill the queue: they cannot shut it out.
        """
        waited = seq.asked is not None and seq.asked.waited
        waiting, limit = self._turns.waiting, self._limits.max_queue_size
        if waiting >= limit + self._lanes.free and not waited and not self._shut_out(seq.request.principal):
            raise Overloaded(f"queue is full: {waiting} requests wait, max_queue_size is {limit}")
        self._turns.append(seq)
        self._deadlines.watch(seq, open_sequences=waiting + len(self._running))

    def plan(self) -> Plan:
        """Admit who can be admitted, then say what the next step does."""
        plan = Plan([], [])
        if self._turns.waiting:
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
            self._turns.remove(seq)
        else:
            self._running.remove(seq)
            self._turns.left(seq)
        seq.state = State.ENDED
        self._forget_making(seq, seq.hashes)
        self._reuse.leave(seq, retain=retain)

    def withdraw(self) -> list[Sequence]:
        """Give back, oldest first, all sequences that wait for a first token, as if never submitted."""
        queued = sorted((seq for seq in self._turns if not seq.output_tokens), key=lambda seq: seq.ticket)
        for seq in queued:
            self.end(seq, retain=False)
        return queued

    def expired(self, now: float) -> list[Sequence]:
        """Open sequences whose deadline has passed, each told once."""
        return self._deadlines.passed(now)

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
            assert seq.prompt_tokens <= seq.prefill_stop <= seq.length, f"prefill to {seq.prefill_stop}"
            assert seq.state is State.PREFILL or seq.written == seq.length - 1, (
                "more than one token unwritten"
            )
        self._turns.check_integrity(self._running)
        for seq in self._turns:
            assert seq.state in (State.WAITING, State.LOADING), f"queued in {seq.state}"
            assert seq.lane is None, "a queued sequence owns a lane"
            assert seq.written == seq.kept == 0, "a queued sequence says it has KV"
        makers = {seq.ticket for seq in self._running if seq.state is State.PREFILL}
        assert all(seq.ticket in makers for seq in self._making.values()), (
            "a block is awaited that nobody makes"
        )
        self._reuse.check_integrity(self.open_sequences())

    def _shut_out(self, principal: str) -> bool:
        """True if others fill the queue and `principal` does not even wait for half of the lanes."""
        mine = self._turns.waiting_of(principal)
        return mine < self._half and mine < self._turns.waiting

    def _admit(self, plan: Plan) -> None:
        """Give out lanes, and take one back for each principal that has fewer than half and finds none."""
        order = self._turns.order() if self._lanes.free or self._turns.above else []
        while order:
            line = heappop(order)[-1]
            giver = None if self._lanes.free else self._giver(line)
            if giver is None and not self._lanes.free:
                return  # nor for those behind: they hold more, or find the same
            seq = self._first_ready(line)
            if seq is None or not self._may_return(seq, line):
                continue
            if giver is not None:
                self._preempt(giver)
            if self._place(seq, plan) and giver is None and line.waiting:
                heappush(order, self._turns.key(line))

    def _place(self, seq: Sequence, plan: Plan) -> bool:
        """Give a sequence the lane that is free; False if the engine fails it."""
        try:
            placed = self._reuse.place(seq)
        except EngineError as error:
            plan.failed.append((seq, error))
            return False
        assert placed, "no lane, though one is free"
        self._turns.placed(seq)
        seq.state = State.PREFILL
        self._running.append(seq)
        self._claim_making(seq)
        return True

    def _giver(self, line: Line) -> Sequence | None:
        """Whoever must give a lane to `line`: of the one principal that holds more than half, if any."""
        above = self._turns.above
        if line.held >= self._half or above is None:
            return None
        return choose(self._running, above.principal)

    def _may_return(self, seq: Sequence, line: Line) -> bool:
        """False for one that was preempted while whoever may take its lane again still waits."""
        if not seq.preemptions or line.held < self._half:
            return True
        return not any(other.waiting and other.held < self._half for other in self._turns.lines)

    def _first_ready(self, line: Line) -> Sequence | None:
        """Who waits for nothing but a lane, in order of arrival."""
        for seq in islice(line.waiting.values(), LOADING_AT_ONCE):
            if not self._loading(seq):
                return seq
        return None

    def _preempt(self, seq: Sequence) -> None:
        """Take the lane of a sequence. Its whole blocks were offered to the cache as they were written."""
        self._running.remove(seq)
        self._forget_making(seq, seq.hashes)
        self._reuse.leave(seq, retain=True)
        seq.state, seq.written, seq.kept = State.WAITING, 0, 0
        seq.preemptions += 1
        self._preemptions += 1
        self._turns.put_back(seq)

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
        """Principals in turn. A part never leaves one token over for the next: two are the smallest step."""
        for seq in self._turns.prefill_order(prefilling):
            left = seq.prefill_stop - seq.written
            take = min(left, budget, self._spec.max_prefill_tokens)
            if left - take == 1:
                take += 1 if take == 2 else -1
            if take <= 0 or (take == 1 and left > 1):
                return
            plan.prefills.append(PrefillPart(seq, seq.written, seq.written + take))
            self._turns.prefilling(seq)
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
