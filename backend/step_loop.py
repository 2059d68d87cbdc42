"""The step loop: one thread that owns scheduler, engine and cache calls, fed through an inbox.

    T1, T4 ──submit, cancel──▶ inbox ──▶ T2: step, step, step … ──deltas──▶ outbox ──▶ T4

While nothing is open the thread sleeps on its inbox. `heartbeat` is the clock at the last turn of the loop:
it moves at least once per IDLE_BEAT_S unless a step takes longer, which is what a watchdog looks at.

Invariants
- A submission is either refused by raising, or ends with exactly one last delta: the inbox is closed under
  a lock before it is emptied for the last time, so nothing can slip in behind.
- An exception that no step expects ends the loop: all open requests fail with its text, later ones are
  refused.

Threads: `submit`, `cancel`, `stop` from any; everything the stepper owns belongs to the loop's thread.
"""

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from backend.errors import BackendError, EngineFailed, Overloaded
from backend.generation import Generation, ReplySink
from backend.sequence import Sequence
from backend.stepper import Stepper

log = logging.getLogger(__name__)

IDLE_BEAT_S = 1.0
LOADING_BEAT_S = 0.002
LOAD_EVERY_S = 0.5
JOIN_MARGIN_S = 30.0

OpenSequence = Callable[[int, Generation, ReplySink], Sequence]


@dataclass(frozen=True, slots=True)
class _Cancel:
    ticket: int


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline: float


class StepLoop:
    """Runs a stepper on its own thread."""

    def __init__(
        self, stepper: Stepper, open_sequence: OpenSequence, *, max_inbox: int, clock: Callable[[], float]
    ) -> None:
        """`open_sequence` runs on the caller's thread; `max_inbox` bounds what waits for the next turn."""
        self._stepper = stepper
        self._open_sequence = open_sequence
        self._max_inbox = max_inbox
        self._clock = clock
        self._inbox: SimpleQueue[Sequence | _Cancel | _Stop] = SimpleQueue()
        self._door = threading.Lock()
        self._closed: BackendError | None = None
        self._tickets = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._next_load = 0.0
        self.heartbeat = clock()
        self.load = stepper.scheduler.load()
        self.integrity_failures = 0

    def start(self) -> None:
        """Begin taking submissions."""
        self._thread.start()

    @property
    def ready(self) -> bool:
        """True while the loop runs and takes submissions."""
        return self._closed is None and self._thread.is_alive()

    def submit(self, request: Generation, sink: ReplySink) -> int:
        """Hand a request over; the ticket is for `cancel`. Raises Overloaded; EngineFailed after a crash."""
        if self._inbox.qsize() >= self._max_inbox:
            raise Overloaded(f"queue is full: {self._max_inbox} requests wait for the next step")
        seq = self._open_sequence(next(self._tickets), request, sink)
        with self._door:
            if self._closed is not None:
                raise self._closed
            self._inbox.put(seq)
        return seq.ticket

    def cancel(self, ticket: int) -> None:
        """End a request before the next step; no effect when it has ended."""
        self._inbox.put(_Cancel(ticket))

    def stop(self, *, drain_s: float) -> None:
        """Refuse new requests, give open ones `drain_s`, fail what is left, end the thread. Idempotent."""
        with self._door:
            if self._closed is None:
                self._closed = Overloaded("the backend is closing")
                self._inbox.put(_Stop(self._clock() + drain_s))
        if self._thread.is_alive():
            self._thread.join(drain_s + JOIN_MARGIN_S)
            if self._thread.is_alive():
                log.error(
                    "step loop did not end within %.0f s: an engine call hangs", drain_s + JOIN_MARGIN_S
                )

    def _run(self) -> None:
        try:
            self._turn_until_stopped()
            self._stepper.fail_all(Overloaded("the backend is closing"))
        except Exception as error:
            log.exception("step loop failed; the backend takes no more requests")
            self._crash(error)

    def _turn_until_stopped(self) -> None:
        stepper = self._stepper
        stop: _Stop | None = None
        wait_s = IDLE_BEAT_S
        checked = True
        while stop is None or (stepper.busy and self._clock() < stop.deadline):
            was_busy = stepper.busy
            stop = self._take(wait_s) or stop
            self.heartbeat = self._clock()
            checked = not stepper.busy and (checked or (not was_busy and self._checked()))
            progressed = stepper.busy and stepper.step()
            stepper.flush()
            self._measure_load()
            waits = LOADING_BEAT_S if stepper.busy else IDLE_BEAT_S
            wait_s = 0.0 if progressed and stepper.busy else waits

    def _checked(self) -> bool:
        """Look for lost lanes and leases, once when a whole idle beat has passed: nothing waits for it."""
        try:
            self._stepper.scheduler.check_integrity()
        except AssertionError:
            self.integrity_failures += 1
            log.exception("the idle scheduler broke an invariant; it goes on, a restart is advised")
        return True

    def _measure_load(self) -> None:
        """Refresh `load` for the metrics page, whenever the loop runs dry and twice a second else."""
        if self.heartbeat >= self._next_load or not self._stepper.busy:
            self._next_load = self.heartbeat + LOAD_EVERY_S
            self.load = self._stepper.scheduler.load()

    def _take(self, wait_s: float) -> _Stop | None:
        """Handle everything in the inbox, waiting up to `wait_s` for the first message."""
        stop: _Stop | None = None
        try:
            message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                if isinstance(message, Sequence):
                    self._stepper.submit(message)
                elif isinstance(message, _Cancel):
                    self._stepper.cancel(message.ticket)
                else:
                    stop = message
                message = self._inbox.get_nowait()
        except Empty:
            return stop

    def _crash(self, error: Exception) -> None:
        """Close the door, then fail whoever is inside, also those still in the inbox."""
        failed = EngineFailed(f"the backend stopped: {type(error).__name__}: {error}")
        with self._door:
            self._closed = failed
        try:
            self._take(0.0)
            self._stepper.fail_all(failed)
        except Exception:
            log.exception("the scheduler is broken too; telling open requests directly")
            self._stepper.abandon(failed)
