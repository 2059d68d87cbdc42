"""Looks again, now and then, whether the release in service is still on disk as it was loaded.

    every `recheck_s` seconds    names, sizes, times of writing and inodes: a few system calls
    every `rehash_s` seconds     every byte, at 100 MB/s at most; at once if the quick look sees a change

What serves lies in memory and is not affected: a difference is an alarm. It is logged and counted once per
file, and stands (`intact` is False) until a full look finds every byte as it was loaded.

Threads: the looking is done on a thread of its own, the only one that changes what is known of a watched
release. `watch`, `readings`, `intact` and `ready` from any thread: a new release is a new `_Watched`, so a
look at the old one that is still going on changes nothing that counts.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from backend.metrics import Reading
from backend.thread_names import show_thread_name
from engines import (
    Difference,
    Pace,
    Rehash,
    ReleaseFacts,
    TrustSettings,
    compare_release,
    rehash_release,
)

log = logging.getLogger(__name__)

REHASH_BYTES_PER_S: Final = 100e6
JOIN_S: Final = 10.0

Compare = Callable[[ReleaseFacts], tuple[Difference, ...]]
FullLook = Callable[[ReleaseFacts, Pace], Rehash]
Wait = Callable[[float | None], bool]
"""Waits so many seconds (None: for ever); True if it was woken before."""


class _Woken(Exception):
    """A look is not worth finishing: another release is in service, or none any more."""


@dataclass(slots=True)
class _Watched:
    """One release in service, and what is known of it. Times by the clock; never: infinity."""

    facts: ReleaseFacts
    next_compare: float
    next_rehash: float
    changed: tuple[Difference, ...] = ()
    logged: set[Difference] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)
    intact: bool = True


class Recheck:
    """Watches one release at a time."""

    def __init__(
        self,
        *,
        trust: TrustSettings,
        recheck_s: float,
        rehash_s: float,
        unready: bool,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait | None = None,
        compare: Compare = compare_release,
        full_look: FullLook | None = None,
    ) -> None:
        """`recheck_s` or `rehash_s` 0: never. `unready`: a release that differs makes the model unready."""
        self._recheck_s = recheck_s or math.inf
        self._rehash_s = rehash_s or math.inf
        self._unready = unready
        self._clock = clock
        self._wake = threading.Event()
        self._wait = wait or self._wake.wait
        self._compare_release = compare
        self._full_look = full_look or (lambda facts, pace: rehash_release(facts, trust=trust, pace=pace))
        self._watched: _Watched | None = None
        self._differences = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="recheck", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, in the middle of a look if need be. Idempotent."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def watch(self, facts: ReleaseFacts) -> None:
        """From now on look at this release, which was just verified, and no longer at another."""
        now = self._clock()
        self._watched = _Watched(facts, now + self._recheck_s, now + self._rehash_s)
        self._wake.set()

    @property
    def intact(self) -> bool:
        """False while the release in service is not on disk as it was loaded, as far as is known."""
        watched = self._watched
        return watched is None or watched.intact

    @property
    def ready(self) -> bool:
        """False if that is to make the model unready."""
        return self.intact or not self._unready

    def readings(self) -> list[Reading]:
        """For the metrics page."""
        return [
            Reading("release_differences_total", float(self._differences)),
            Reading("release_intact", float(self.intact)),
        ]

    def turn(self) -> float | None:
        """Do what is due; seconds until something is due again, None if nothing will be."""
        watched = self._watched
        if watched is None:
            return None
        if self._clock() >= watched.next_compare:
            watched.next_compare = self._clock() + self._recheck_s
            self._compare(watched)
        if self._clock() >= watched.next_rehash:
            watched.next_rehash = self._clock() + self._rehash_s
            self._rehash(watched)
        due = min(watched.next_compare, watched.next_rehash) - self._clock()
        return None if due == math.inf else max(0.0, due)

    def _run(self) -> None:
        show_thread_name()
        while not self._closed:
            self._wake.clear()
            pause: float | None = 0.0
            try:
                if not self._closed:
                    pause = self.turn()
            except _Woken:
                continue
            except Exception:
                log.exception("the release in service could not be looked at")
            self._wait(None if pause is None else min(pause, threading.TIMEOUT_MAX))

    def _compare(self, watched: _Watched) -> None:
        differences = self._compare_release(watched.facts)
        if differences != watched.changed:  # even if all looks well again: only bytes prove it
            watched.changed = differences
            watched.next_rehash = self._clock()
        self._report(watched, differences)

    def _rehash(self, watched: _Watched) -> None:
        pace = Pace(REHASH_BYTES_PER_S, clock=self._clock, pause=self._pause)
        try:
            seen = self._full_look(watched.facts, pace)
        except _Woken:
            watched.next_rehash = self._clock()  # if it is still watched, from the beginning
            raise
        self._report(watched, seen.differences)
        if seen.differences:
            return
        if not watched.intact:
            log.info("release %s: every byte is as it was loaded", watched.facts.digest[:16])
        self._watched_again(watched, seen.facts)

    def _watched_again(self, watched: _Watched, facts: ReleaseFacts) -> None:
        watched.facts = (
            facts  # files that were touched, or replaced by equal ones, are the ones to compare with
        )
        watched.changed = ()
        watched.logged.clear()
        watched.counted.clear()
        watched.intact = True

    def _report(self, watched: _Watched, differences: tuple[Difference, ...]) -> None:
        for one in differences:
            watched.intact = False
            if one not in watched.logged:
                watched.logged.add(one)
                log.error("release %s is not as it was loaded: %s", watched.facts.digest[:16], one)
            if one.file not in watched.counted:
                watched.counted.add(one.file)
                self._differences += 1

    def _pause(self, seconds: float) -> None:
        if self._wait(seconds):
            raise _Woken
