"""The step loop: one thread that owns scheduler, engine and cache calls, fed through an inbox.

    T1, T4 ──submit, cancel──▶ inbox ──▶ T2: step, step, step … ──deltas──▶ outbox ──▶ T4
    swapper ──call(job)──────▶ inbox ──▶ T2: at most one job between two steps

It drives the stepper of the release that serves and, after a swap to other KV, that of the one before, until
the last sequence of that one has ended.

While nothing is open the thread sleeps on its inbox. `heartbeat` is the clock at the last turn of the loop:
it moves at least once per IDLE_BEAT_S unless a step or a job takes longer, which is what a watchdog looks at;
`job_since` tells the two apart.

Invariants
- A submission is either refused by raising, or ends with exactly one last delta: the inbox is closed under
  a lock before it is emptied for the last time, so nothing can slip in behind.
- A sequence is submitted to the release that serves, or not at all (NotServing): that is asked under the same
  lock that a switch takes. What came in before a switch is in the inbox before its `_Leave`, so a stepper
  that is left gets no more sequences after that message.
- An exception that no step expects ends the loop: all open requests fail with its text, later ones are
  refused. An exception in a job is its asker's.

Threads: `submit`, `cancel`, `stop`, `call`, `switch`, `close_door` from any; everything a stepper owns
belongs to the loop's thread.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from queue import Empty, SimpleQueue
from typing import TypeVar

from backend.errors import BackendError, EngineFailed, Overloaded
from backend.loop_job import LoopJob
from backend.metrics import Load
from backend.open_release import OpenRelease
from backend.sequence import Sequence
from backend.stepper import Stepper
from backend.thread_names import show_thread_name

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_BEAT_S = 1.0
LOADING_BEAT_S = 0.002
LOAD_EVERY_S = 0.5
JOIN_MARGIN_S = 30.0
JOIN_LOOK_S = 0.1
JOB_LIMIT_S = 120.0
"""How long a job may wait for its turn: far longer than any step."""


class NotServing(Exception):
    """The release that a request was read under does not serve any more: read it again."""


@dataclass(frozen=True, slots=True)
class _Submit:
    seq: Sequence
    stepper: Stepper


@dataclass(frozen=True, slots=True)
class _Cancel:
    ticket: int


@dataclass(frozen=True, slots=True)
class _Leave:
    """The stepper gets nothing any more; tell when its last sequence has ended."""

    stepper: Stepper
    left: threading.Event


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline: float


_Message = _Submit | _Cancel | _Leave | _Stop | LoopJob[object]


class StepLoop:
    """Runs steppers on its own thread."""

    def __init__(self, release: OpenRelease, *, max_inbox: int, clock: Callable[[], float]) -> None:
        """`release` serves first; `max_inbox` bounds what waits for the next turn."""
        self._serving: OpenRelease | None = release
        self._steppers = [release.stepper]
        self._leaving: list[_Leave] = []
        self._max_inbox = max_inbox
        self._clock = clock
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._door = threading.Lock()
        self._closed: BackendError | None = None
        self._tickets = itertools.count(1)
        self.thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._next_load = 0.0
        self.heartbeat = clock()
        self.job_since: float | None = None
        """When the job that runs now began."""
        self.load = release.stepper.scheduler.load()
        self.integrity_failures = 0

    def start(self) -> None:
        """Begin taking submissions."""
        self.thread.start()

    @property
    def serving(self) -> OpenRelease | None:
        """The release that gets the submissions."""
        return self._serving

    @property
    def alive(self) -> bool:
        """True until the thread ends; it may refuse submissions already."""
        return self.thread.is_alive()

    @property
    def ready(self) -> bool:
        """True while the loop runs and takes submissions."""
        return self._closed is None and self.alive

    @property
    def busy(self) -> bool:
        """True while a sequence is open or a message waits."""
        return self._any_open() or not self._inbox.empty()

    def new_ticket(self) -> int:
        """A number for a request: what `cancel` takes."""
        return next(self._tickets)

    def submit(self, seq: Sequence, release: OpenRelease) -> None:
        """Hand over what `release` began. Raises Overloaded, NotServing; EngineFailed after a crash."""
        waited = seq.asked is not None and seq.asked.waited
        if self._inbox.qsize() >= self._max_inbox and not waited:
            raise Overloaded(f"queue is full: {self._max_inbox} requests wait for the next step")
        with self._door:
            if self._closed is not None:
                raise self._closed
            if self._serving is None or release.stepper is not self._serving.stepper:
                raise NotServing
            self._inbox.put(_Submit(seq, release.stepper))

    def cancel(self, ticket: int) -> None:
        """End a request before the next step; no effect when it has ended."""
        self._inbox.put(_Cancel(ticket))

    def call(self, job: Callable[[], T], /) -> T:
        """Run `job` on the loop's thread between two steps; what it returns or raises."""
        posted = LoopJob(job)
        with self._door:
            if self._closed is not None:
                raise self._closed
            self._inbox.put(posted)
        return posted.wait(JOB_LIMIT_S, alive=lambda: self.alive)

    def switch(self, release: OpenRelease | None) -> threading.Event:
        """From now on `release` gets the submissions; None: nobody.

        The event is set once the last sequence of the stepper before has ended; never if that goes on with
        the new release, or if it is switched back to.
        """
        left = threading.Event()
        with self._door:
            before, self._serving = self._serving, release
            if before is not None and (release is None or before.stepper is not release.stepper):
                self._inbox.put(_Leave(before.stepper, left))
        return left

    def close_door(self, error: BackendError) -> None:
        """Refuse everything from now on with `error`, also if the loop's thread hangs in an engine call."""
        with self._door:
            self._closed = self._closed or error

    def stop(self, *, drain_s: float, hangs: Callable[[], bool] = lambda: False) -> bool:
        """Refuse new requests, give open ones `drain_s`, fail what is left, end the thread. Idempotent.

        False if the thread did not end: it may still use the engine. `hangs` spares waiting for that.
        """
        self.close_door(Overloaded("the backend is closing"))
        self._inbox.put(_Stop(self._clock() + drain_s))
        limit = time.monotonic() + drain_s + JOIN_MARGIN_S
        while self.alive and not hangs() and time.monotonic() < limit:
            self.thread.join(JOIN_LOOK_S)
        if self.alive:
            log.error("step loop did not end, with %.0f s to drain: an engine call hangs", drain_s)
        return not self.alive

    def _run(self) -> None:
        show_thread_name()
        try:
            self._turn_until_stopped()
            self._end_all(Overloaded("the backend is closing"))
        except Exception as error:
            log.exception("step loop failed; the backend takes no more requests")
            self._crash(error)

    def _turn_until_stopped(self) -> None:
        stop: _Stop | None = None
        wait_s = IDLE_BEAT_S
        checked = True
        while stop is None or (self._any_open() and self._clock() < stop.deadline):
            was_busy = self._any_open()
            taken = self._take(wait_s)
            stop = stop or taken
            self.heartbeat = self._clock()
            busy = self._any_open()
            checked = not busy and (checked or (not was_busy and self._checked()))
            progressed = self._step()
            self._let_go()
            self._measure_load()
            busy = self._any_open()
            waits = LOADING_BEAT_S if busy else IDLE_BEAT_S
            wait_s = 0.0 if progressed and busy else waits

    def _any_open(self) -> bool:
        return any(stepper.busy for stepper in self._steppers)

    def _step(self) -> bool:
        """One step of each stepper; False if none had anything to run."""
        progressed = False
        for stepper in self._steppers:
            progressed = (stepper.busy and stepper.step()) or progressed
            stepper.flush()
        return progressed

    def _let_go(self) -> None:
        """Forget the steppers that nobody needs any more, and say so; take in the one that serves."""
        serving = self._serving.stepper if self._serving is not None else None
        for leave in [leave for leave in self._leaving if leave.stepper is serving]:
            self._leaving.remove(leave)  # it was taken back
        for leave in [leave for leave in self._leaving if not leave.stepper.busy]:
            self._leaving.remove(leave)
            self._steppers = [stepper for stepper in self._steppers if stepper is not leave.stepper]
            leave.left.set()
        if serving is not None and serving not in self._steppers:
            self._steppers = [*self._steppers, serving]

    def _checked(self) -> bool:
        """Look for lost lanes and leases, once when a whole idle beat has passed: nothing waits for it."""
        try:
            for stepper in self._steppers:
                stepper.scheduler.check_integrity()
        except AssertionError:
            self.integrity_failures += 1
            log.exception("the idle scheduler broke an invariant; it goes on, a restart is advised")
        return True

    def _measure_load(self) -> None:
        """Refresh `load` for the metrics page, whenever the loop runs dry and twice a second else."""
        if self.heartbeat >= self._next_load or not self._any_open():
            self._next_load = self.heartbeat + LOAD_EVERY_S
            self.load = reduce(add, (stepper.scheduler.load() for stepper in self._steppers), Load())

    def _take(self, wait_s: float) -> _Stop | None:
        """Handle what is in the inbox, waiting up to `wait_s` for the first message.

        A job ends the turn: whoever posts one after the other must not hold up the steps.
        """
        stop: _Stop | None = None
        try:
            message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while not isinstance(message, LoopJob):
                stop = self._handle(message) or stop
                message = self._inbox.get_nowait()
        except Empty:
            return stop
        self._work(message)
        return stop

    def _handle(self, message: _Submit | _Cancel | _Leave | _Stop) -> _Stop | None:
        if isinstance(message, _Submit):
            if message.stepper not in self._steppers:
                self._steppers = [*self._steppers, message.stepper]
            message.stepper.submit(message.seq)
        elif isinstance(message, _Cancel):
            for stepper in self._steppers:
                stepper.cancel(message.ticket)
        elif isinstance(message, _Leave):
            self._leaving.append(message)
        else:
            return message
        return None

    def _work(self, job: LoopJob[object]) -> None:
        self.job_since = self.heartbeat = self._clock()
        try:
            job.run()
        finally:
            self.job_since = None

    def _end_all(self, error: BackendError) -> None:
        """Fail whoever is inside, also those still in the inbox; the door is closed."""
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, LoopJob):
                message.refuse(error)
            else:
                self._handle(message)
        for stepper in self._steppers:
            stepper.fail_all(error)
        self._let_go()

    def _crash(self, error: Exception) -> None:
        failed = EngineFailed(f"the backend stopped: {type(error).__name__}: {error}")
        with self._door:
            self._closed = failed
        try:
            self._end_all(failed)
        except Exception:
            log.exception("the scheduler is broken too; telling open requests directly")
            for stepper in self._steppers:
                stepper.abandon(failed)
