"""The watchdog: notices when the step loop or the replies thread is dead or stuck, and speaks for it.

    heartbeats ──look──▶ watchdog ──▶ `problem`: not ready, new requests are refused at once
                                 └──▶ replies: open streams end with an error, until the loop moves again

A step is short, because the first use of every shape was prewarmed: a loop that makes no turn for `limit_s`
hangs, mostly inside the engine. It may come back; then it finds its abandoned requests cancelled, and the
backend is ready again. A job between two steps may warm up a candidate: it gets JOB_TIMES as long.

A replies thread that hangs or ended leaves nobody who may send on the open streams: whoever uses a sender has
to be the only one. Then the backend is not ready, refusals are sent by whoever refuses, and the end of the
process is left to its supervisor.

Invariants
- Nothing that a watched thread may hold is needed here: no lock of the loop, no engine, no cache. Only an
  engine call that keeps Python's own lock stops this thread too; then only a probe from outside notices.
- Silence is counted while the watchdog itself runs, so that a process that was stopped and continued does not
  take its own absence for a stall.
- Each stall is counted, logged and told to the streams once.

Threads: `look` on the watchdog's own; `problem`, `expect_end` and `stop` from any.
"""

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import PurePath
from typing import Final, Protocol

from backend.errors import BackendStuck
from backend.metrics import Reading
from backend.thread_names import show_thread_name

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.25
JOB_TIMES: Final = 3
JOIN_S: Final = 5.0
FRAMES: Final = 8


class WatchedThread(Protocol):
    """What is seen of a Thread."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    @property
    def ident(self) -> int | None:
        """None before it is started."""
        ...

    def is_alive(self) -> bool:
        """False before it is started and after its end."""
        ...


class Watched(Protocol):
    """A thread that shows that it moves."""

    @property
    def thread(self) -> WatchedThread:
        """It itself."""
        ...

    @property
    def heartbeat(self) -> float:
        """Changes at least every second or so, unless something in it hangs."""
        ...


class WatchedLoop(Watched, Protocol):
    """The step loop."""

    @property
    def job_since(self) -> float | None:
        """None unless it works on a job between two steps."""
        ...


class WatchedReplies(Watched, Protocol):
    """The replies thread."""

    def fail_open(self, error: Exception) -> None:
        """End every open stream, and those that come, with `error`. Never blocks."""
        ...

    def reopen(self) -> None:
        """Streams may stay open again. Never blocks."""
        ...


class Watchdog:
    """Watches the two threads of a decoder."""

    def __init__(
        self, loop: WatchedLoop, replies: WatchedReplies, *, limit_s: float, clock: Callable[[], float]
    ) -> None:
        """`limit_s`: how long a step may take; it must be longer than the threads' idle beats."""
        self._watched_loop = loop
        self._loop = _Pulse(loop, clock)
        self._replies = _Pulse(replies, clock)
        self._streams = replies
        self._limit_s = limit_s
        self._clock = clock
        self._last_look = clock()
        self._end_expected = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._stalls = 0
        self._looks = 0

    def start(self) -> None:
        """Begin to look; the watched threads run already."""
        self._last_look = self._clock()
        self._thread.start()

    @property
    def problem(self) -> BackendStuck | None:
        """Why nothing can be served now, with how long already; None while all is well."""
        return self._loop.error() or self._replies.error()

    @property
    def loop_hangs(self) -> bool:
        """True while the step loop hangs, or if it ended unasked."""
        return bool(self._loop.trouble)

    def readings(self) -> list[Reading]:
        """For the metrics page. The heartbeats stand still while anything is wrong, this thread included."""
        return [
            Reading("step_loop_stalls_total", float(self._stalls)),
            Reading("step_loop_stuck", float(bool(self._loop.trouble))),
            Reading("heartbeats_total", float(self._looks)),
        ]

    def expect_end(self) -> None:
        """From now on a watched thread that ends was told to."""
        self._end_expected = True

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def look(self) -> None:
        """Compare with what was seen last; act on what changed."""
        now = self._clock()
        elapsed = min(now - self._last_look, 2 * LOOK_EVERY_S)
        self._last_look = now
        allowed = self._limit_s * (1 if self._watched_loop.job_since is None else JOB_TIMES)
        trouble = self._loop.diagnose(elapsed, allowed=allowed, may_end=self._end_expected)
        if trouble and not self._loop.trouble:
            self._stalls += 1
            self._loop.say(trouble)
            if (error := self._loop.error()) is not None:
                self._streams.fail_open(error)
        elif self._loop.trouble and not trouble:
            self._streams.reopen()  # first: whoever finds the door open again may leave his stream open
            self._loop.say("")
        self._replies.say(self._replies.diagnose(elapsed, allowed=self._limit_s, may_end=self._end_expected))
        self._looks += self.problem is None

    def _run(self) -> None:
        show_thread_name()
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception:
                log.exception("the watchdog could not look; it goes on")


class _Pulse:
    """What is known of one thread. `trouble` is read from any thread: "" while it is well."""

    def __init__(self, watched: Watched, clock: Callable[[], float]) -> None:
        self._watched = watched
        self._clock = clock
        self._beat = watched.heartbeat
        self._quiet_s = 0.0
        self.trouble = ""

    def error(self) -> BackendStuck | None:
        """What callers are told; a new one each time, because it is raised on several threads."""
        trouble = self.trouble
        if not trouble:
            return None
        silent_s = self._clock() - self._watched.heartbeat
        return BackendStuck(f"{self._watched.thread.name} {trouble}, silent for {silent_s:.1f} s")

    def diagnose(self, elapsed: float, *, allowed: float, may_end: bool) -> str:
        """What is wrong with it after `elapsed` more seconds."""
        beat = self._watched.heartbeat
        self._quiet_s = self._quiet_s + elapsed if beat == self._beat else 0.0
        self._beat = beat
        if not self._watched.thread.is_alive():
            return self.trouble if may_end else "has ended"
        if self.trouble and self._quiet_s:
            return self.trouble  # until it moves, whatever is allowed meanwhile
        return f"hangs (limit {allowed:g} s)" if self._quiet_s >= allowed else ""

    def say(self, trouble: str) -> None:
        """Publish a diagnosis, and log it if it is news."""
        before, self.trouble = self.trouble, trouble
        thread = self._watched.thread
        if trouble and not before:
            log.error("%s %s, at %s", thread.name, trouble, place_of(thread))
        elif before and not trouble:
            log.warning("%s moves again: the backend is ready", thread.name)


def place_of(thread: WatchedThread) -> str:
    """Where a thread is in its Python code, innermost call first, on one line."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls: list[str] = []
    while frame is not None and len(calls) < FRAMES:
        code = frame.f_code
        calls.append(f"{PurePath(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(calls) or "nowhere any more"
