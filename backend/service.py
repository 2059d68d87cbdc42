"""A decoder in service: takes requests from the server's thread, and owns the threads that answer them.

    execute ─▶ admission (authorise, parse, submit) ─▶ (step loop) ─▶ (replies) ─▶ sender
                                       (swapper) ─▶ another release, while all this goes on

Knows nothing of Triton: requests are names and arrays, the way back is a `Sender`.

Threads: `handle` on the server's thread (T1); `close` once, after the last `handle`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from backend.admission import Admission
from backend.errors import Overloaded
from backend.generation import Generation
from backend.open_release import OpenRelease
from backend.replies import Replies, Sender
from backend.step_loop import StepLoop
from backend.swapper import Swapper


class DecoderService:
    """The release that serves with everything around it, running."""

    def __init__(
        self,
        serving: OpenRelease,
        *,
        loop: StepLoop,
        admission: Admission,
        replies: Replies,
        drain_s: float,
        swapper: Swapper | None = None,
    ) -> None:
        """Without a swapper, `serving` serves to the end."""
        self._serving = serving
        self._loop = loop
        self._admission = admission
        self._replies = replies
        self._drain_s = drain_s
        self._swapper = swapper
        replies.start()
        loop.start()
        if swapper is not None:
            swapper.start()

    @property
    def ready(self) -> bool:
        """True while requests are taken."""
        return self._loop.ready and self._admission.open

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
    ) -> None:
        """Start a request; whatever happens, the last `sender` gets exactly one last delta. Never raises."""
        self._admission.enter(request_id, inputs, parameters, sender)

    def close(self) -> None:
        """Drain, stop the threads, free engine and cache. What the arena holds stays for the next process."""
        if self._swapper is not None:
            self._swapper.stop()
        self._loop.stop(drain_s=self._drain_s)
        if self._swapper is not None:
            self._swapper.join()
        self._admission.refuse_all(Overloaded("the backend is closing"))
        self._replies.stop()
        serving = self._serving if self._swapper is None else self._swapper.serving
        if serving is not None:
            serving.close()
