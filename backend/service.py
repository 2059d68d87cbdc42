"""A decoder in service: takes requests from the server's thread, and owns the threads that answer them.

    execute ─▶ admission (authorise, parse, submit) ─▶ (step loop) ─▶ (replies) ─▶ sender
                                       (swapper) ─▶ another release, while all this goes on

Knows nothing of Triton: requests are names and arrays, the way back is a `Sender`.

Threads: `handle` on the server's thread (T1); `close` once, after the last `handle`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy.typing as npt

from backend.admission import Admission
from backend.errors import Overloaded
from backend.generation import Generation
from backend.open_release import OpenRelease
from backend.recheck import Recheck
from backend.replies import Replies, Sender
from backend.step_loop import StepLoop
from backend.swapper import Swapper
from backend.watchdog import Watchdog
from cachemgr import Beyond, NothingBeyond


class DecoderService:
    """The release that serves with everything around it, running."""

    def __init__(
        self,
        serving: OpenRelease,
        *,
        loop: StepLoop,
        admission: Admission,
        replies: Replies,
        watchdog: Watchdog,
        drain_s: float,
        swapper: Swapper | None = None,
        recheck: Recheck | None = None,
        beyond: Beyond | None = None,
        follows: Iterable[Callable[[], None]] = (),
    ) -> None:
        """Without a swapper, `serving` serves to the end; with one, it is the swapper's to close.

        `follows`: what ends the threads that follow files.
        """
        self._serving = serving if swapper is None else None
        self._loop = loop
        self._admission = admission
        self._replies = replies
        self._watchdog = watchdog
        self._drain_s = drain_s
        self._swapper = swapper
        self._recheck = recheck
        self._beyond = beyond or NothingBeyond()
        self._follows = tuple(follows)
        replies.start()
        loop.start()
        watchdog.start()
        if swapper is not None:
            swapper.start()
        if recheck is not None:
            recheck.start()

    @property
    def ready(self) -> bool:
        """True while requests are taken."""
        as_loaded = self._recheck is None or self._recheck.ready
        return self._loop.ready and self._admission.open and self._watchdog.problem is None and as_loaded

    @property
    def release(self) -> str:
        """Digest of the release in service; empty while there is none."""
        serving = self._loop.serving
        return serving.spec.digest if serving is not None else ""

    def handle(
        self,
        request_id: str,
        inputs: Callable[[], Mapping[str, npt.NDArray[Any]]],
        parameters: Mapping[str, object],
        *,
        sender: Callable[[Generation | None], Sender],
        admitted: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a request; whatever happens, the last `sender` gets exactly one last delta. Never raises.

        `admitted` is called before anything is sent, if the caller may ask at all.
        """
        problem = self._watchdog.problem
        if problem is None:
            self._admission.enter(request_id, inputs, parameters, sender, admitted=admitted)
        else:
            self._admission.turn_away(request_id, parameters, sender, problem)

    def close(self) -> None:
        """Drain, stop the threads, free engine and cache. What the arena holds stays for the next process.

        A step loop that hangs may be inside the engine: then both are left to the end of the process.
        """
        if self._recheck is not None:
            self._recheck.close()
        if self._swapper is not None:
            self._swapper.stop()
        self._watchdog.expect_end()
        ended = self._loop.stop(drain_s=self._drain_s, hangs=lambda: self._watchdog.loop_hangs)
        if self._swapper is not None and ended:
            self._swapper.join()
        self._admission.refuse_all(Overloaded("the backend is closing"))
        self._watchdog.stop()
        self._replies.stop()
        serving = self._swapper.serving if self._swapper is not None else self._serving
        for end in self._follows:
            end()
        try:
            if serving is not None and ended:
                serving.close()
        finally:
            self._beyond.close()
