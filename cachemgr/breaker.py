"""Stops asking who does not answer, and lets one request through now and then to see whether he does.

    closed      every request goes through
    open        none does, for `open_s`
    half-open   the one request that was let through after that decides: answered → closed, trouble → open

Opens after three troubles in a row, or at once where nobody listens. A probe that never reports does not hold
the breaker: after another `open_s` the next one goes.

Threads: the IO thread only.
"""

import logging
from collections.abc import Callable

TROUBLES = 3

_log = logging.getLogger(__name__)


class Breaker:
    """The breaker of `who`, as log lines name it: "peer n2". `clock`: monotonic seconds."""

    __slots__ = ("_clock", "_down_since", "_open_s", "_opened", "_probing", "_row", "_until", "_who")

    def __init__(self, who: str, *, open_s: float, clock: Callable[[], float]) -> None:
        self._who = who
        self._open_s = open_s
        self._clock = clock
        self._row = 0
        self._until: float | None = None
        self._probing = False
        self._down_since: float | None = None
        self._opened = 0

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        if self._until is None:
            return "closed"
        return "half-open" if self._probing else "open"

    @property
    def closed(self) -> bool:
        """True while every request goes through."""
        return self._until is None

    @property
    def due(self) -> bool:
        """True if it is not closed, and would let a request through now."""
        return self._until is not None and self._clock() >= self._until

    @property
    def down_since(self) -> float | None:
        """When it opened, if nothing was answered since."""
        return self._down_since

    @property
    def opened(self) -> int:
        """How often it went from closed to open."""
        return self._opened

    def admit(self) -> bool:
        """May a request go now? Whoever is let through says afterwards how it went."""
        if self._until is None:
            return True
        now = self._clock()
        if now < self._until:
            return False
        self._until = now + self._open_s
        self._probing = True
        return True

    def hurry(self) -> None:
        """There is a sign that it is back: the next request may see, whatever is left of `open_s`."""
        if self._until is not None and not self._probing:
            self._until = self._clock()

    def answered(self) -> None:
        """It answered, whatever it said."""
        self._row = 0
        if self._until is not None:
            self._until = None
            self._probing = False
            down_s = self._clock() - (self._down_since or 0.0)
            _log.info("%s answers again after %.1f s", self._who, down_s)
        self._down_since = None

    def trouble(self, kind: str, *, refused: bool = False) -> None:
        """A request failed; `refused`: nobody listens there."""
        self._row += 1
        now = self._clock()
        if self._until is not None:
            if self._probing:
                self._probing = False
                self._until = now + self._open_s
            return
        if refused or self._row >= TROUBLES:
            self._until = now + self._open_s
            self._down_since = now
            self._opened += 1
            _log.warning("%s is down (%s): not asked for %g s", self._who, kind, self._open_s)
