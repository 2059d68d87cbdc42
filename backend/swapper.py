"""The swapper: a thread that looks at `<version>/current` and changes the release under running streams.

    look ─▶ load chain ─▶ switch between two steps ─▶ the old one is closed          side_by_side
    look ─▶ requests wait, live ones end ─▶ old one closed ─▶ load chain ─▶ reopen   drain

side_by_side, same KV: the new engine takes over the lanes, and every sequence goes on in them.
side_by_side, other KV: what runs and what is queued finishes on the old release, new requests start on the
new one. Until the last of the old ones has ended no further swap begins: at most two releases are in memory,
and nobody is cut short. `current` is looked at again afterwards.
drain: sequences without a lane wait with the newcomers and are read again by the release that answers them.
Live ones have `drain_s`; if one is still alive then, the swap is put off and tried again later: a swap never
ends a request. While requests wait their own deadlines count.

Invariants
- One swap at a time. Whatever fails in it leaves the old release serving, or brings it back, and nothing of
  the new one in memory.
- A release that was refused is not tried again until it is deployed again, or its folder or its signature
  changes. Only when nothing serves any more, or a drain was put off, is it tried again by the clock.

Threads: everything here runs on the swapper's own thread, but `start` and `stop`.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from backend.admission import Admission
from backend.errors import EngineFailed
from backend.metrics import SWAPPED, RequestMetrics
from backend.open_release import OpenRelease
from backend.step_loop import StepLoop
from backend.swap_refusal import DRAIN, DrainTimeout, Refusal, refusal_of
from backend.watched_release import Target, look
from engines import Runner, give_back_freed_memory

log = logging.getLogger(__name__)

SwapMode = Literal["side_by_side", "drain", "off"]

RETRY_S = (1.0, 60.0)
"""Pause before what failed is tried again: doubles from the first to the second."""

JOIN_S = 60.0
WAIT_S = 0.5


class ReleaseOpener(Protocol):
    """Runs the whole load chain and opens what passes it."""

    def current(self, *, beside: OpenRelease | None, run: Runner) -> OpenRelease:
        """The release that `current` names; `beside` serves meanwhile."""
        ...

    def published(self, digest: str, *, run: Runner) -> OpenRelease:
        """A release of the version folder, whatever `current` names."""
        ...


@dataclass(frozen=True, slots=True)
class SwapSettings:
    """How to swap. Seconds: between two looks, and what live sequences have to end."""

    mode: SwapMode
    poll_s: float
    drain_s: float


class Swapper:
    """Owns the swapper's thread, and which release serves."""

    def __init__(
        self,
        serving: OpenRelease,
        version_dir: Path,
        *,
        settings: SwapSettings,
        opener: ReleaseOpener,
        loop: StepLoop,
        admission: Admission,
        metrics: RequestMetrics,
        now_serves: Callable[[OpenRelease], None] = lambda new: None,
    ) -> None:
        """`now_serves` hears of every switch, on the step loop's thread or the swapper's."""
        self._serving: OpenRelease | None = serving
        self._tell_serving = now_serves
        self._wanted_back = serving.spec.digest
        self._version_dir = version_dir
        self._settings = settings
        self._opener = opener
        self._loop = loop
        self._admission = admission
        self._metrics = metrics
        self._refused: Target | None = None
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swapper", daemon=True)

    def start(self) -> None:
        """Begin looking."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no more swaps."""
        self._closing.set()

    def join(self) -> None:
        """Wait for the swap under way, which fails if the step loop has ended."""
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                log.error("the swapper did not end within %.0f s: a release is still loading", JOIN_S)

    @property
    def serving(self) -> OpenRelease | None:
        """The one to close at the end."""
        return self._serving

    def _run(self) -> None:
        while not self._closing.wait(self._settings.poll_s):
            try:
                self._look()
            except Exception:
                log.exception("the swapper stumbled; it goes on")

    def _look(self) -> None:
        target = look(self._version_dir)
        serving = self._serving
        if serving is not None and target.digest == serving.spec.digest:
            self._refused = None
            return
        if target == self._refused and not self._due():
            return
        if self._settings.mode == "off":
            self._refused = target
            log.info("current names %s; swap is off: it is read at the next load", _short(target.digest))
        elif target.problem and serving is not None:
            self._refuse(target, Refusal("current", target.problem))
        elif serving is None:
            self._come_back(target)
            give_back_freed_memory()
        else:
            self._swap(serving, target)
            give_back_freed_memory()

    def _due(self) -> bool:
        return self._retry_at > 0.0 and time.monotonic() >= self._retry_at

    def _swap(self, old: OpenRelease, target: Target) -> None:
        started = time.monotonic()
        kept = False
        try:
            if self._settings.mode == "drain":
                self._drain_and_load(old)
            else:
                kept = self._load_beside(old)
        except Exception as error:
            refusal = self._told(error)
        else:
            self._done(old, started, kept=kept)
            return
        if self._closing.is_set():
            return
        self._refuse(target, refusal, again=refusal.reason == DRAIN)
        if self._serving is None:
            self._come_back(target, after=refusal)

    def _load_beside(self, old: OpenRelease) -> bool:
        """True if the KV was kept."""
        new = self._opener.current(beside=old, run=self._loop.call)
        try:
            if new.goes_on(old):
                self._loop.call(lambda: self._go_on(old, new))
                left = None
            else:
                left = self._loop.switch(new)
                self._now_serves(new)
        except BaseException:
            new.close(keep=old)
            raise
        while left is not None and not left.wait(WAIT_S):
            if not self._loop.alive:
                break
        old.close(keep=new)
        return left is None

    def _go_on(self, old: OpenRelease, new: OpenRelease) -> None:
        """On the step loop's thread, between two steps."""
        new.adopt(old)
        self._loop.switch(new)
        self._now_serves(new)

    def _drain_and_load(self, old: OpenRelease) -> None:
        self._admission.shut()
        left = self._loop.switch(None)
        try:
            self._admission.take_back(self._loop.call(old.stepper.withdraw))
            if not left.wait(self._settings.drain_s):
                running = old.stepper.scheduler.running
                raise DrainTimeout(f"drain: {running} requests still run after {self._settings.drain_s:g} s")
            if self._closing.is_set():
                raise DrainTimeout("drain: the backend is closing")
        except BaseException:
            self._loop.switch(old)
            self._admission.reopen(old)
            raise
        self._serving = None
        self._wanted_back = old.spec.digest
        old.close()
        del old
        give_back_freed_memory()  # what the new one needs is asked for before it is loaded
        self._let_in(self._opener.current(beside=None, run=self._loop.call))

    def _come_back(self, target: Target, *, after: Refusal | None = None) -> None:
        """Nothing serves: what `current` names, else what served last, else everybody is told.

        `after`: what `current` names was refused just now.
        """
        started = time.monotonic()
        reasons = [] if after is None else [after.text]
        openings: list[Callable[[], OpenRelease]] = [
            lambda: self._opener.published(self._wanted_back, run=self._loop.call)
        ]
        if after is None:
            openings.insert(0, lambda: self._opener.current(beside=None, run=self._loop.call))
        for opening in openings:
            try:
                self._let_in(opening())
            except Exception as error:
                refusal = self._told(error)
            else:
                serving = self._serving
                assert serving is not None
                self._retry_at, self._retry_s = 0.0, RETRY_S[0]
                log.info("swap: %s serves again after %.1f s", serving.name, time.monotonic() - started)
                return
            if self._closing.is_set():
                return
            self._refuse(target, refusal, again=True)
            reasons.append(refusal.text)
        why = "; nor the one before: ".join(reasons)
        self._admission.refuse_all(EngineFailed(f"no release can be loaded: {why}"))

    def _let_in(self, new: OpenRelease) -> None:
        """All who wait are read and submitted under `new`."""
        self._loop.switch(new)
        self._now_serves(new)
        self._admission.reopen(new)

    def _now_serves(self, new: OpenRelease) -> None:
        self._serving = new
        self._metrics.release = new.name
        self._tell_serving(new)

    def _done(self, old: OpenRelease, started: float, *, kept: bool) -> None:
        serving = self._serving
        assert serving is not None
        self._refused, self._retry_at, self._retry_s = None, 0.0, RETRY_S[0]
        log.info(
            "swap: release %d (%s) → %d (%s), %s, %.2f s, KV %s",
            old.spec.release,
            old.name,
            serving.spec.release,
            serving.name,
            self._settings.mode,
            time.monotonic() - started,
            "kept" if kept else "not shared",
        )
        self._metrics.swapped(SWAPPED)  # last: who sees the count finds the line

    def _refuse(self, target: Target, refusal: Refusal, *, again: bool = False) -> None:
        self._refused = target
        self._retry_at = time.monotonic() + self._retry_s if again else 0.0
        self._retry_s = min(2 * self._retry_s, RETRY_S[1]) if again else RETRY_S[0]
        serves = self._serving.name if self._serving is not None else "nothing"
        log.warning("swap to %s refused, %s serves: %s", _short(target.digest), serves, refusal.text)
        self._metrics.swapped(refusal.reason)

    def _told(self, error: Exception) -> Refusal:
        """What there is to say about it; the log has the rest of what nobody expected."""
        refusal = refusal_of(error)
        if refusal.unexpected:
            # as text: a log handler that keeps records would keep the frames, and with them the release
            log.error("swap failed unexpectedly\n%s", "".join(traceback.format_exception(error)).rstrip())
        return refusal


def _short(digest: str) -> str:
    return digest[:16] or "(unreadable)"
