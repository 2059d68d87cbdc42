"""One step of the engine: decode running sequences, prefill some of the waiting ones, sample, tell.

Deltas of the decode are delivered before the prefill runs, so that a long prompt does not hold up words
that are ready; a stream gets one delivery per engine call, not per token.

Invariants
- Logits are used before the next engine call: they belong to the engine.
- Every sequence gets exactly one last delta, with `finish` or with `error`.
- An engine error ends the sequences that were in that call and nobody else. A GPU that is lost ends the loop.

Threads: owned by the step loop; nothing here blocks but the engine.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backend.errors import BackendError, EngineFailed
from backend.generation import Delta, FinishReason, ReplySink, Usage
from backend.lane_cleaning import clean_lane
from backend.metrics import Reading
from backend.prefill_cost import PrefillCost
from backend.sampling import Sampled, Sampler
from backend.scheduler import PrefillPart, Scheduler
from backend.sequence import Sequence as Running
from backend.sequence import State
from engines import DeviceLostError, Engine, EngineError


class Outbox(Protocol):
    """Takes what a step has to say. Never blocks."""

    def deliver(self, batch: list[tuple[ReplySink, Delta]]) -> None:
        """Pass each delta to its sink, in order, from any thread."""
        ...


class Observer(Protocol):
    """Hears of every request that ended or was refused, for metrics and the log. Never blocks."""

    def ended(self, seq: Running, *, outcome: str, now: float) -> None:
        """`outcome` is a finish reason or the name of the error. A probe's end is no news."""
        ...

    def refused(self, request_id: str, *, reason: str) -> None:
        """A request was turned away before it was queued; `reason` is the name of the error."""
        ...


class Stepper:
    """Runs the steps of one engine; `step` is called again and again while `busy`."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        *,
        sampler: Sampler,
        outbox: Outbox,
        observer: Observer,
        cost: PrefillCost,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._sampler = sampler
        self._outbox = outbox
        self._observer = observer
        self._cost = cost
        self._clock = clock
        self._batch: list[tuple[ReplySink, Delta]] = []
        self._open: dict[int, Running] = {}

    @property
    def busy(self) -> bool:
        """True while any sequence is open."""
        return bool(self._open)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for gauges and integrity checks on the same thread."""
        return self._scheduler

    def readings(self) -> list[Reading]:
        """Totals for the metrics page."""
        return self._scheduler.readings()

    @property
    def sampler(self) -> Sampler:
        """Makes the rows that sequences of this stepper need."""
        return self._sampler

    def adopt(self, engine: Engine) -> None:
        """Go on with `engine`, which takes over the lanes as they are. Between two steps."""
        engine.adopt_kv(self._engine)
        self._engine = engine
        self._scheduler.adopt(engine)

    def withdraw(self) -> list[Running]:
        """Take back, in order, every sequence that has had no token yet; its caller has heard nothing so far.

        One that was preempted after its first token stays: nobody but this stepper may go on with it.
        """
        queued = self._scheduler.withdraw()
        for seq in queued:
            del self._open[seq.ticket]
        return queued

    def submit(self, seq: Running) -> None:
        """Queue a sequence, or tell it at once that there is no room."""
        try:
            self._scheduler.submit(seq)
        except BackendError as error:
            self._batch.append((seq.sink, Delta(error=error)))
            if not seq.request.probe:
                self._observer.refused(seq.request.request_id, reason=type(error).__name__)
        else:
            self._open[seq.ticket] = seq
            if seq.request.echo and seq.request.prompt_text:
                seq.unsent.text = seq.request.prompt_text

    def cancel(self, ticket: int) -> None:
        """End a sequence whose caller went away; unknown tickets have ended already."""
        seq = self._open.get(ticket)
        if seq is not None:
            self._finish(seq, FinishReason.CANCELLED)

    def step(self) -> bool:
        """One step; False if there was nothing to run (all open sequences wait for blocks)."""
        for seq in self._scheduler.expired(self._clock()):
            self._finish(seq, FinishReason.DEADLINE)
        plan = self._scheduler.plan()
        for seq, error in plan.failed:
            self._fail([seq], error)
        if plan.decodes:
            self._decode(plan.decodes)
            self.flush()
        for part in plan.prefills:
            self._prefill(part)
        self.flush()
        return bool(plan.decodes or plan.prefills)

    def flush(self) -> None:
        """Deliver what is left to say."""
        if self._batch:
            batch, self._batch = self._batch, []
            self._outbox.deliver(batch)

    def fail_all(self, error: BackendError) -> None:
        """Tell every open sequence that it will not be finished."""
        for seq in list(self._open.values()):
            self._end(seq, Delta(error=error), outcome=type(error).__name__, retain=False)
        self.flush()

    def abandon(self, error: BackendError) -> None:
        """Tell open sequences without touching the scheduler: its state cannot be trusted any more."""
        self._batch.extend((seq.sink, Delta(error=error)) for seq in self._open.values())
        self._open.clear()
        self.flush()

    def _decode(self, seqs: list[Running]) -> None:
        tokens = np.array([seq.last_token for seq in seqs], dtype=np.int64)
        positions = np.array([seq.written for seq in seqs], dtype=np.int64)
        lanes = [seq.lane for seq in seqs if seq.lane is not None]
        try:
            logits = self._engine.decode(lanes, tokens, positions)
        except EngineError as error:
            self._fail(seqs, error)
            return
        sampled = self._sampler.sample(logits.array, [seq.row for seq in seqs])
        self._fail_rows(seqs, sampled)
        for seq in seqs:
            if seq.state is State.ENDED:
                continue
            try:
                self._scheduler.decoded(seq)
            except EngineError as error:
                self._fail([seq], error)
        self._accept(seqs, sampled)

    def _prefill(self, part: PrefillPart) -> None:
        seq = part.seq
        assert seq.lane is not None
        started = self._clock()
        try:
            logits = self._engine.prefill(seq.lane, seq.tokens[part.start : part.stop], part.start)
            sampled = self._sampler.sample(logits.array, [seq.row])
            self._cost.observe(part.stop - part.start, self._clock() - started)
            self._fail_rows([seq], sampled)
            if seq.state is State.ENDED:
                return
            self._scheduler.prefilled(part)
        except EngineError as error:
            self._fail([seq], error)
            return
        if part.last:
            if seq.first_token_at is None:
                seq.first_token_at = self._clock()
            self._accept([seq], sampled)

    def _fail_rows(self, seqs: Sequence[Running], sampled: Sampled) -> None:
        """End rows whose logits are not numbers, also in mid-prompt: before their KV is offered to others."""
        for row, error in sampled.failures.items():
            seq = seqs[row]
            lane, positions = seq.lane, seq.length
            self._end(seq, Delta(error=error), outcome=type(error).__name__, retain=False)
            if lane is not None:
                clean_lane(self._engine, lane, positions=positions)

    def _accept(self, seqs: Sequence[Running], sampled: Sampled) -> None:
        logprobs: npt.NDArray[np.float32] | None = sampled.logprobs
        for row, token in enumerate(sampled.tokens.tolist()):
            seq = seqs[row]
            if seq.state is State.ENDED:
                continue
            if logprobs is not None and seq.request.logprobs:
                seq.unsent.logprobs.append(float(logprobs[row]))
            self._take(seq, token)

    def _take(self, seq: Running, token: int) -> None:
        """Add one token to a sequence and say what became certain."""
        seq.row.accept(token)
        seq.append(token)
        unsent = seq.unsent
        unsent.token_ids.append(token)
        if token in seq.eos and not seq.request.ignore_eos:
            self._finish(seq, FinishReason.STOP)
            return
        text = seq.text.push(token)
        if text:
            unsent.text += text
        if seq.text.stopped:
            self._finish(seq, FinishReason.STOP)
        elif seq.full:
            self._finish(seq, FinishReason.LENGTH)
        elif text and seq.request.stream:
            seq.unsent = Delta()
            self._batch.append((seq.sink, unsent))

    def _finish(self, seq: Running, reason: FinishReason) -> None:
        delta = seq.unsent
        delta.text += seq.text.finish()
        held_stop = reason is FinishReason.LENGTH and seq.text.stopped
        delta.finish = FinishReason.STOP if held_stop else reason
        first = seq.first_token_at
        ttft = 0.0 if first is None else first - seq.request.received
        delta.usage = Usage(seq.prompt_tokens, seq.output_tokens, seq.cached_tokens, ttft)
        self._end(seq, delta, outcome=delta.finish.value, retain=True)

    def _fail(self, seqs: Sequence[Running], error: EngineError) -> None:
        if isinstance(error, DeviceLostError):
            raise error  # no step can work any more: the loop ends, and its watchers replace the process
        for seq in seqs:
            failed = EngineFailed(f"engine failed: {error}")
            self._end(seq, Delta(error=failed), outcome=type(failed).__name__, retain=False)

    def _end(self, seq: Running, delta: Delta, *, outcome: str, retain: bool) -> None:
        self._scheduler.end(seq, retain=retain)
        self._open.pop(seq.ticket, None)  # not before: `abandon` must find it if the scheduler is broken
        self._batch.append((seq.sink, delta))
        self._observer.ended(seq, outcome=outcome, now=self._clock())
