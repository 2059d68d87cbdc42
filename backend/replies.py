"""The replies thread: sends what the step loop said, and notices callers that went away.

    T2 ──deliver(batch)──▶ queue ──▶ T4: merge per stream ──send──▶ caller
    T2 ◀──cancel(ticket)──────────── T4: poll is_cancelled

Sending takes tens of microseconds and may wait for the caller, so the step loop never does it. Deltas of
one stream that pile up while this thread is busy are merged into one response: a slow thread costs
granularity, not order.

While the step loop says nothing, `fail_open` ends every stream in its place, and so each one that is watched
before `reopen`: a request may have passed the door a moment before it was shut.

Invariants
- A stream's deltas are sent in order; FINAL follows its last one, always, also when a send fails.
- What is said of a stream after its FINAL is dropped: a loop that comes back does not know that it ended.
- A stream that was never given a ticket (refused at the door) is finished by whoever opened it, through
  `fail`.
- `heartbeat` is the clock at the last round or send: it moves every IDLE_S unless a send hangs.

Threads: `open`, `watch`, `fail`, `deliver`, `fail_open`, `reopen` from any; sending and polling on this
thread alone.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from backend.generation import Delta, ReplySink
from backend.thread_names import show_thread_name

log = logging.getLogger(__name__)

POLL_S = 0.02
POLLS_AT_ONCE = 32
IDLE_S = 1.0
JOIN_S = 10.0


class Sender(Protocol):
    """The way back to one caller. Called by the replies thread only."""

    def send(self, delta: Delta, *, final: bool) -> None:
        """Send a response made of `delta`; after `final` nothing follows."""
        ...

    def cancelled(self) -> bool:
        """True once the caller went away."""
        ...


@dataclass(slots=True, eq=False)
class ReplyStream:
    """One caller's open stream; the sink that deltas are emitted to."""

    sender: Sender
    ticket: int | None = None
    unsent: list[Delta] = field(default_factory=list)
    done: Callable[[Delta], None] | None = None
    """Called once, on the replies thread, with the last delta."""
    cancelling: bool = False
    ended: bool = False
    """The last delta is here; `closed`: it was sent, and the caller must not be asked any more."""
    closed: bool = False

    def emit(self, delta: Delta) -> None:
        """Keep a delta until the end of the round."""
        self.unsent.append(delta)
        self.ended = delta.finish is not None or delta.error is not None


@dataclass(frozen=True, slots=True)
class _Shut:
    """From here on no stream stays open; None: they may again."""

    error: Exception | None


class Replies:
    """Owns the replies thread."""

    def __init__(
        self, *, cancel: Callable[[int], None], after_round: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        """`cancel` ends a ticket; `after_round` runs on this thread after a round, at least every second."""
        self._cancel = cancel
        self._after_round = after_round
        self._clock = clock
        self._queue: SimpleQueue[list[tuple[ReplySink, Delta]] | ReplyStream | _Shut | None] = SimpleQueue()
        self._streams: deque[ReplyStream] = deque()
        self._shut: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._next_poll = 0.0
        self.heartbeat = clock()

    def start(self) -> None:
        """Begin sending."""
        self.heartbeat = self._clock()
        self.thread.start()

    def open(self, sender: Sender) -> ReplyStream:
        """A stream to submit with; `watch` it once the step loop took it."""
        return ReplyStream(sender)

    def watch(self, stream: ReplyStream, ticket: int) -> None:
        """From now on the caller is asked whether it is still there."""
        stream.ticket = ticket
        self._queue.put(stream)

    def fail(self, stream: ReplyStream, error: Exception) -> None:
        """End a stream that the step loop never took."""
        self.deliver([(stream, Delta(error=error))])

    def deliver(self, batch: list[tuple[ReplySink, Delta]]) -> None:
        """Queue a batch; never blocks."""
        self._queue.put(batch)

    def fail_open(self, error: Exception) -> None:
        """End every open stream with `error` and cancel its request; also those watched before `reopen`."""
        self._queue.put(_Shut(error))

    def reopen(self) -> None:
        """Streams may stay open again."""
        self._queue.put(_Shut(None))

    def stop(self) -> bool:
        """Send what is queued, then end the thread: False if a send hangs. Call it after the step loop's."""
        self._queue.put(None)
        if self.thread.is_alive():
            self.thread.join(JOIN_S)
            if self.thread.is_alive():
                log.error("replies thread did not end within %.0f s: a send hangs", JOIN_S)
        return not self.thread.is_alive()

    def _run(self) -> None:
        show_thread_name()
        running = True
        while running:
            touched, running = self._collect()
            self.heartbeat = self._clock()
            for stream in touched:
                self._send(stream)
            now = self._clock()
            if now >= self._next_poll:
                self._next_poll = now + POLL_S
                self._poll()
            try:
                self._after_round()
            except Exception:
                log.exception("metrics could not be published")

    def _collect(self) -> tuple[list[ReplyStream], bool]:
        """Wait for a batch, take all there are, and say which streams have something to send."""
        touched: list[ReplyStream] = []
        try:
            item = self._queue.get(timeout=POLL_S if self._streams else IDLE_S)
            while item is not None:
                if isinstance(item, ReplyStream):
                    self._take_in(item, touched)
                elif isinstance(item, _Shut):
                    self._shut = item.error
                    for stream in self._streams:
                        self._end_unasked(stream, touched)
                else:
                    for sink, delta in item:
                        self._emit(sink, delta, touched)
                item = self._queue.get_nowait()
            return touched, False
        except Empty:
            return touched, True

    def _take_in(self, stream: ReplyStream, touched: list[ReplyStream]) -> None:
        self._streams.append(stream)
        self._end_unasked(stream, touched)

    def _end_unasked(self, stream: ReplyStream, touched: list[ReplyStream]) -> None:
        """While shut: tell the caller, and have the loop cancel the request should it come back."""
        if self._shut is not None and not stream.ended:
            self._emit(stream, Delta(error=self._shut), touched)
            self._give_up(stream)

    def _emit(self, sink: ReplySink, delta: Delta, touched: list[ReplyStream]) -> None:
        if not isinstance(sink, ReplyStream):
            sink.emit(delta)
        elif not sink.ended:
            if not sink.unsent:
                touched.append(sink)
            sink.emit(delta)

    def _send(self, stream: ReplyStream) -> None:
        self.heartbeat = self._clock()
        delta = merge(stream.unsent)
        stream.unsent = []
        final = delta.finish is not None or delta.error is not None
        try:
            stream.sender.send(delta, final=final)
        except Exception as error:  # the server's own error type is known to one module only
            log.warning("a response could not be sent: %s", error)
            self._give_up(stream)
        stream.closed = stream.closed or final
        if final and stream.done is not None:
            done, stream.done = stream.done, None
            try:
                done(delta)
            except Exception:  # whoever counts wrongly must not keep the others from their answers
                log.exception("the end of a stream could not be counted")

    def _poll(self) -> None:
        """Ask some of the callers, in turn, whether they are still there: each answer is a round trip."""
        for _ in range(min(len(self._streams), POLLS_AT_ONCE)):
            stream = self._streams.popleft()
            if stream.closed:
                continue
            if stream.sender.cancelled():
                self._give_up(stream)
            self._streams.append(stream)

    def _give_up(self, stream: ReplyStream) -> None:
        if stream.ticket is not None and not stream.cancelling:
            stream.cancelling = True
            self._cancel(stream.ticket)


def merge(deltas: list[Delta]) -> Delta:
    """One delta that says what `deltas` say, in order."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[value for delta in deltas for value in delta.logprobs],
        finish=last.finish,
        usage=last.usage,
        error=last.error,
    )
