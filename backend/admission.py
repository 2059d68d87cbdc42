"""The door: reads each request under the release that serves, and submits it; while none does, it waits.

    enter ─▶ parse ─▶ begin ─▶ submit          a release serves
      └────▶ waiting room ─▶ reopen ─▶ parse …  none does: the old one is freed before the new one is loaded

Invariants
- A request gets exactly one last delta, whatever happens to releases meanwhile.
- Whoever waits is read under the release that will answer, in order of arrival; what came before the room was
  closed is in front. Its deadline counts from its arrival.
- A request that was let into a queue once is never refused for want of room.

Threads: `enter` on the server's thread; `expire` and `cancel` on the replies thread; the rest by the swapper.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.access import Access, Caller, Reason, Verb
from backend.admin import ADMIN_PARAMETER, Administrator
from backend.asked import Asked, Inputs
from backend.errors import AccessDenied, BackendError, EngineFailed, Overloaded
from backend.generation import Delta, FinishReason, Generation, Usage
from backend.open_release import OpenRelease
from backend.parsing import PROBE, read_deadline
from backend.replies import Replies, ReplyStream, Sender
from backend.sequence import Sequence
from backend.step_loop import NotServing, StepLoop
from backend.stepper import Observer

log = logging.getLogger(__name__)

READINGS = 8
"""How often a request is read again because the release changed meanwhile: a swap takes far longer."""

_NOTHING_SAID = Usage(0, 0, 0, 0.0)


class Admission:
    """Who may come in, and under which release."""

    def __init__(
        self,
        loop: StepLoop,
        *,
        replies: Replies,
        access: Access,
        admin: Administrator,
        observer: Observer,
        max_waiting: int,
        keep_inputs: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep_inputs`: requests may be read again long after `enter` returned, so take copies."""
        self._loop = loop
        self._replies = replies
        self._authoriser, self._allowances, self._audit = access.authoriser, access.allowances, access.audit
        self._admin = admin
        self._observer = observer
        self._max_waiting = max_waiting
        self._keep_inputs = keep_inputs
        self._clock = clock
        self._lock = threading.Lock()
        self._shut = False
        self._refusal: BackendError | None = None
        self._waiting: deque[Asked] = deque()

    @property
    def open(self) -> bool:
        """True while requests are answered, or wait for a release that is on its way."""
        return self._refusal is None

    @property
    def waiting(self) -> int:
        """Requests in the waiting room."""
        return len(self._waiting)

    def enter(
        self,
        request_id: str,
        inputs: Callable[[], Mapping[str, npt.NDArray[Any]]],
        parameters: Mapping[str, object],
        sender: Callable[[Generation | None], Sender],
        *,
        admitted: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a request, or let it wait, or refuse it. Never raises.

        `admitted`: see DecoderService.handle.
        """
        asked = Asked(request_id, {}, parameters, sender, received=self._clock())
        verb = Verb.ADMIN if ADMIN_PARAMETER in parameters else Verb.INFER
        try:
            asked.caller = self._authoriser.authorise(parameters, verb=verb)
            self._allowances.enter(asked.caller)
            asked.entered = True
            admitted()
            read = inputs()
            asked.inputs = _copied(read) if self._keep_inputs else read
            if verb is Verb.ADMIN:
                self._command(asked)
            else:
                self._start_or_wait(asked)
        except Exception as error:
            self._refuse(asked, error)

    def turn_away(
        self,
        request_id: str,
        parameters: Mapping[str, object],
        sender: Callable[[Generation | None], Sender],
        error: BackendError,
    ) -> None:
        """Refuse a request on this thread: the replies thread may be what hangs. Never raises."""
        if PROBE not in parameters:
            self._observer.refused(request_id, reason=type(error).__name__)
        try:
            sender(None).send(Delta(error=error), final=True)
        except Exception as failure:  # the server's own error type: the caller is gone
            log.warning("a refusal could not be sent: %s", failure)

    def shut(self) -> None:
        """From now on requests wait."""
        with self._lock:
            self._shut = True

    def take_back(self, queued: Iterable[Sequence]) -> None:
        """Let sequences that the step loop gave back wait in front of those that came later."""
        returned = []
        for seq in queued:
            assert seq.asked is not None, "a sequence that nobody asked for"
            seq.asked.waited, seq.asked.deadline = True, seq.request.deadline
            returned.append(seq.asked)
        with self._lock:
            self._waiting.extendleft(reversed(returned))

    def reopen(self, release: OpenRelease) -> None:
        """Everybody in, under `release`, which the step loop serves already."""
        while (asked := self._next_or_open()) is not None:
            try:
                self._resume(asked, release)
            except Exception as error:
                self._refuse(asked, error)

    def refuse_all(self, error: BackendError) -> None:
        """There is no release to wait for: tell whoever waits, and whoever comes until `reopen`."""
        with self._lock:
            self._shut = True
            self._refusal = error
            waiting, self._waiting = list(self._waiting), deque()
        for asked in waiting:
            self._refuse(asked, error)

    def expire(self) -> None:
        """End the wait of those whose deadline has passed."""
        if not self._waiting:
            return
        now = self._clock()
        self._leave(lambda asked: asked.deadline is not None and asked.deadline <= now, FinishReason.DEADLINE)

    def cancel(self, ticket: int) -> None:
        """End a request whose caller went away, wherever it is."""
        if not self._leave(lambda asked: asked.ticket == ticket, FinishReason.CANCELLED):
            self._loop.cancel(ticket)

    def _start_or_wait(self, asked: Asked) -> None:
        for _ in range(READINGS):
            release = self._loop.serving
            if self._shut or release is None:
                if self._wait(asked):
                    return
                continue
            request = self._read(asked, release)
            asked.ticket = self._loop.new_ticket()
            asked.stream = stream = self._open(asked, request)
            try:
                self._loop.submit(release.begin(asked, request, stream), release)
            except NotServing:
                continue  # it was left between our look and our submission
            self._replies.watch(stream, asked.ticket)
            return
        raise Overloaded("the release changed again and again while the request was read")

    def _read(self, asked: Asked, release: OpenRelease) -> Generation:
        request = release.parse(asked, lambda: asked.received)
        asked.probe = request.probe
        if asked.caller.probe_only and not request.probe:
            raise AccessDenied(Reason.NOT_A_PROBE, principal=asked.caller.principal)
        if not asked.charged:
            self._allowances.charge(asked.caller, len(request.prompt))
            asked.charged = True
        return request

    def _command(self, asked: Asked) -> None:
        command = asked.parameters[ADMIN_PARAMETER]
        outcome = "failed"
        try:
            text = self._admin.answer(asked.caller, command, asked.inputs, self._loop.serving)
            outcome = "done"
        except BackendError as error:
            outcome = str(error)
            raise
        finally:
            self._audit.commanded(asked.request_id, asked.caller, str(command), outcome)
        delta = Delta(text=text, finish=FinishReason.STOP, usage=_NOTHING_SAID)
        self._replies.deliver([(self._open(asked, None), delta)])

    def _open(self, asked: Asked, request: Generation | None) -> ReplyStream:
        """A way back; when its last word is sent, the caller has one open request less."""
        stream = self._replies.open(asked.sender(request))
        if asked.entered:
            stream.done = partial(self._left, asked.caller)
        return stream

    def _left(self, caller: Caller, last: Delta) -> None:
        self._allowances.leave(caller, tokens=last.usage.output_tokens if last.usage is not None else 0)

    def _wait(self, asked: Asked) -> bool:
        """Into the waiting room; False if a release serves after all."""
        asked.deadline = read_deadline(asked.parameters, asked.received)
        asked.inputs = _copied(asked.inputs)
        stream = asked.stream = self._open(asked, None)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if not self._shut:
                return False
            if len(self._waiting) >= self._max_waiting:
                raise Overloaded(f"queue is full: {len(self._waiting)} requests wait for the next release")
            asked.ticket = self._loop.new_ticket()
            asked.waited = True
            self._waiting.append(asked)
        self._replies.watch(stream, asked.ticket)
        return True

    def _next_or_open(self) -> Asked | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._shut = False
            self._refusal = None
            return None

    def _resume(self, asked: Asked, release: OpenRelease) -> None:
        stream = asked.stream
        assert stream is not None, "it waits without a stream"
        request = self._read(asked, release)
        stream.sender = asked.sender(request)
        self._loop.submit(release.begin(asked, request, stream), release)
        if stream.cancelling:  # between the waiting room and the inbox nobody could find it
            self._loop.cancel(asked.ticket)

    def _leave(self, which: Callable[[Asked], bool], reason: FinishReason) -> bool:
        """End the wait of some; False if there were none."""
        with self._lock:
            leaving = [asked for asked in self._waiting if which(asked)]
            if leaving:
                self._waiting = deque(asked for asked in self._waiting if asked not in leaving)
        for asked in leaving:
            self._end(asked, Delta(finish=reason, usage=_NOTHING_SAID), reason.value)
        return bool(leaving)

    def _refuse(self, asked: Asked, error: Exception) -> None:
        if not isinstance(error, BackendError):
            log.error("request %s could not be handled", asked.request_id or "-", exc_info=error)
            error = EngineFailed("internal error while the request was read; the log has the details")
        if isinstance(error, AccessDenied):
            self._audit.refused(asked.request_id, error)
        self._end(asked, Delta(error=error), type(error).__name__)

    def _end(self, asked: Asked, delta: Delta, outcome: str) -> None:
        """The last word to a request that no stepper has."""
        if not asked.probe:
            self._observer.refused(asked.request_id, reason=outcome)
        stream = asked.stream or self._open(asked, None)
        self._replies.deliver([(stream, delta)])


def _copied(inputs: Inputs) -> Inputs:
    """The server may take its memory back once `enter` has returned."""
    return {name: np.array(item) for name, item in inputs.items()}
