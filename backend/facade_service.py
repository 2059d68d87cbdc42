"""Runs a facade: one waiting thread per open request, no queue behind them, and an end to every wait.

A decoder whose process dies leaves its callers without an answer, for ever, and a client that leaves is
noticed by nobody in a call inside the server. One watcher looks after all open requests: it refuses those
whose decoder died or is late, which gives their places to others, and has the decoder end those whose client
left, as far as the server notices that: a gRPC call that is cancelled, but no HTTP connection that closes
before the answer is written.

Invariants
- The first answer to a request counts, later ones are dropped: each gets exactly one response. It stays in
  `_open` until that is sent.
- A sender is not asked anything once it has sent: the server has forgotten the request by then.

Threads: `start` and `close` on Triton's thread; each open request on a thread that only waits, and so each
cancellation; one watcher, which polls only while requests are open.
"""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from backend.calls import Process, new_call_id
from backend.errors import DecoderGone, Overloaded
from backend.facade import Facade

log = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
"""Triton lets a model go when its requests are answered: only a decoder that hangs leaves any here."""

POLL_S: Final = 0.025
POLLS_AT_ONCE: Final = 16


class FacadeService:
    """The facade's open requests."""

    def __init__(self, facade: Facade, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._facade = facade
        self._clock = clock
        self._open: dict[int, _OpenRequest] = {}
        self._by_credential: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._closing = False
        threading.Thread(target=self._watch, name="facade-watch", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Always: whether the decoder is, shows when it is asked."""
        return True

    def start(self, request: Any) -> None:
        """Answer `request` on a thread of its own, or refuse it when `max_open_requests` are open."""
        patience_s = self._facade.patience_s(request)
        deadline = self._clock() + patience_s
        credential = self._facade.credential(request)
        opened = _OpenRequest(request.get_response_sender(), patience_s, deadline, credential)
        number = next(self._numbers)
        with self._changed:
            problem = self._no_room(credential)
            if not problem:
                self._open[number] = opened
                self._by_credential[credential] += 1
                self._changed.notify_all()
        if not problem:
            threading.Thread(target=self._serve, args=(request, number, opened), daemon=True).start()
        else:
            opened.answer(self._facade.refuse(Overloaded(problem)), flags=self._facade.final_flag)

    def _no_room(self, credential: str) -> str:
        """What is full: one caller may have half of all open requests, so that others find room."""
        limit = self._facade.max_open_requests
        half = max(1, limit // 2)
        if len(self._open) >= limit:
            return f"{limit} requests are open, max_open_requests is {limit}"
        if credential and self._by_credential[credential] >= half:
            return f"{half} requests of this caller are open, half of what max_open_requests is ({limit})"
        return ""

    def close(self) -> None:
        """Wait for open requests; those of a decoder that never answers are left after CLOSE_S."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._open, timeout=CLOSE_S)

    def _serve(self, request: Any, number: int, opened: "_OpenRequest") -> None:
        self._answer(number, opened, self._facade.answer(request, opened))

    def _answer(self, number: int, opened: "_OpenRequest", response: Any) -> None:
        opened.answer(response, flags=self._facade.final_flag)
        with self._changed:
            if self._open.pop(number, None) is not None:
                self._by_credential[opened.credential] -= 1
                if not self._by_credential[opened.credential]:
                    del self._by_credential[opened.credential]
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._closing)
                if not self._open:
                    return
                opened = dict(self._open)
            for number, one in opened.items():
                self._look_after(number, one)
            time.sleep(POLL_S * (1 + len(opened) // POLLS_AT_ONCE))  # each question is a round trip

    def _look_after(self, number: int, opened: "_OpenRequest") -> None:
        decoder = self._facade.decoder
        if opened.deadline <= self._clock():
            problem = f"{decoder}: no answer within {opened.patience_s:g} s"
            self._answer(number, opened, self._facade.refuse(DecoderGone(problem)))
        elif opened.decoder_ended():
            self._answer(number, opened, self._facade.refuse(DecoderGone(f"{decoder}: its process died")))
        elif opened.client_left():
            threading.Thread(target=self._cancel, args=(opened.call_id,), daemon=True).start()

    def _cancel(self, call_id: str) -> None:
        try:
            self._facade.cancel(call_id)
        except Exception as error:  # the server's own error type
            log.warning("a request whose client left could not be cancelled: %s", error)


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request without an answer; used by its own thread and by the watcher."""

    sender: Any
    patience_s: float
    deadline: float
    credential: str = field(default="", repr=False)
    call_id: str = field(default_factory=new_call_id)
    _decoder: Process | None = None
    _taken: bool = False
    _cancelled: bool = False
    _answered: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def received(self, decoder_pid: int) -> None:
        """The decoder has the call: from now on it can be cancelled, and the decoder watched."""
        with self._lock:
            self._taken = True
            if self._answered:
                return
            try:
                self._decoder = Process(decoder_pid)
            except OSError as error:  # a sandbox without such descriptors, or gone already
                log.debug("process %d cannot be watched: %s", decoder_pid, error)

    def decoder_ended(self) -> bool:
        """True once the process that works on this request is gone."""
        with self._lock:
            return self._decoder is not None and not self._answered and self._decoder.ended

    def client_left(self) -> bool:
        """True once, if the client is gone and the decoder can be told."""
        with self._lock:
            if self._answered or self._cancelled or not self._taken:
                return False
            self._cancelled = bool(self.sender.is_cancelled())
            return self._cancelled

    def answer(self, response: Any, *, flags: Any) -> None:
        """Send the one response; no effect after the first."""
        with self._lock:
            if self._answered:
                return
            self._answered = True
            if self._decoder is not None:
                self._decoder.close()
            try:
                self.sender.send(response, flags=flags)
            except Exception as error:  # the server's own error type: the caller is gone
                log.warning("a response could not be sent: %s", error)
