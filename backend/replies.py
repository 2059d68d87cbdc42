"""The replies thread: sends what the step loop said, and notices callers that went away.

    T2 ──deliver(batch)──▶ queue ──▶ T4: merge per stream ──send──▶ caller
    T2 ◀──cancel(ticket)──────────── T4: poll is_cancelled

Sending takes tens of microseconds and may wait for the caller, so the step loop never does it. Deltas of
one stream that pile up while this thread is busy are merged into one response: a slow thread costs
granularity, not order.

Invariants
- A stream's deltas are sent in order; FINAL follows its last one, always, also when a send fails.
- A stream that was never given a ticket (refused at the door) is finished by whoever opened it, through
  `fail`.

Threads: `open`, `fail`, `deliver` from any; sending and polling on this thread alone.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from backend.generation import Delta, ReplySink

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
    cancelling: bool = False
    closed: bool = False

    def emit(self, delta: Delta) -> None:
        """Keep a delta until the end of the round."""
        self.unsent.append(delta)


class Replies:
    """Owns the replies thread."""

    def __init__(
        self, *, cancel: Callable[[int], None], after_round: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        """`cancel` ends a ticket; `after_round` runs on this thread after a round, at least every second."""
        self._cancel = cancel
        self._after_round = after_round
        self._clock = clock
        self._queue: SimpleQueue[list[tuple[ReplySink, Delta]] | ReplyStream | None] = SimpleQueue()
        self._streams: deque[ReplyStream] = deque()
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._next_poll = 0.0

    def start(self) -> None:
        """Begin sending."""
        self._thread.start()

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

    def stop(self) -> None:
        """Send what is queued, then end the thread. Idempotent; call it after the step loop has stopped."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        running = True
        while running:
            touched, running = self._collect()
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
                    self._streams.append(item)
                else:
                    for sink, delta in item:
                        if isinstance(sink, ReplyStream) and not sink.unsent:
                            touched.append(sink)
                        sink.emit(delta)
                item = self._queue.get_nowait()
            return touched, False
        except Empty:
            return touched, True

    def _send(self, stream: ReplyStream) -> None:
        delta = merge(stream.unsent)
        stream.unsent = []
        final = delta.finish is not None or delta.error is not None
        try:
            stream.sender.send(delta, final=final)
        except Exception as error:  # the server's own error type is known to one module only
            log.warning("a response could not be sent: %s", error)
            self._give_up(stream)
        stream.closed = stream.closed or final

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
