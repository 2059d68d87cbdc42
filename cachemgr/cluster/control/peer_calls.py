"""Runs calls to one peer: admits them, times them, and turns trouble into misses, counts and breaker news.

A call that had less time than `fair_s` and ran out of it says nothing about the peer: it is counted, and
the breaker does not hear of it. Nor does it hear of a peer that is well and merely busy.

Invariant: `run` returns the call's result or the miss it was given; only cancellation and our bugs get out.
Threads: the IO thread.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cachemgr.breaker import Breaker
from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.control.latency import Latency
from cachemgr.cluster.control.packed import MessageError
from cachemgr.cluster.control.trouble import ANSWERED, NO_PEER, ControlTrouble, Trouble
from cachemgr.ring import NodeId

T = TypeVar("T")

_log = logging.getLogger(__name__)


class PeerCalls:
    """Calls to `node`. `clock`: monotonic seconds."""

    def __init__(self, node: NodeId, *, open_s: float, fair_s: float, clock: Callable[[], float]) -> None:
        self._node = node
        self._fair_s = fair_s
        self._clock = clock
        self._idle = asyncio.Event()
        self._idle.set()
        self.breaker = Breaker(f"peer {node}", open_s=open_s, clock=clock)
        self.latency = Latency(clock=clock)
        self.running = 0
        self.heard_at = clock()
        """When it last answered; when we began, if it never did."""
        self.problem = ""
        """Why what answers there is no peer of ours; empty if it is."""
        self.troubles: Counter[str] = Counter()
        """By kind; those of the bulk channel as `bulk_…`, calls that the breaker stopped as `not_asked`."""
        self.closed = False

    async def run(
        self, work: Callable[[], Awaitable[T]], *, miss: T, deadline: float, timed: bool = False
    ) -> T:
        """What `work` returns; `miss` in trouble, or if no request may go there now.

        `timed`: how long it takes says what others of its kind will take.
        """
        if self.closed or not self.breaker.admit():
            self.troubles["not_asked"] += 1
            return miss
        began = self._clock()
        self.running += 1
        self._idle.clear()
        try:
            result = await work()
        except ControlTrouble as trouble:
            self._control_trouble(trouble, fair=deadline - began >= self._fair_s)
        except PeerTrouble as trouble:
            self._bulk_trouble(trouble, fair=deadline - began >= self._fair_s)
        except MessageError as error:
            self._control_trouble(ControlTrouble(Trouble.GARBAGE, str(error)), fair=True)
        else:
            self._answered()
            return result
        finally:
            if timed:
                self.latency.note(self._clock() - began)
            self.running -= 1
            if not self.running:
                self._idle.set()
        return miss

    async def finish(self, within_s: float) -> None:
        """Run nothing new, and wait for what runs."""
        self.closed = True
        if self.running:
            try:
                async with asyncio.timeout(within_s):
                    await self._idle.wait()
            except TimeoutError:
                if self.running:  # the last one may have ended at that very moment
                    _log.warning("peer %s: %d calls are broken off", self._node, self.running)

    def _answered(self) -> None:
        self.heard_at = self._clock()
        self.problem = ""
        self.breaker.answered()

    def _control_trouble(self, trouble: ControlTrouble, *, fair: bool) -> None:
        kind = trouble.kind
        self.troubles[kind.value] += 1
        _log.debug("peer %s: %s", self._node, trouble)
        if kind in NO_PEER and not self.problem:
            self.problem = str(trouble)
            _log.warning("peer %s is not used: %s", self._node, trouble)
        if kind in ANSWERED:
            self.heard_at = self._clock()
            self.breaker.answered()
        elif kind is not Trouble.CLOSED and (fair or kind is not Trouble.DEADLINE):
            self.breaker.trouble(kind.value, refused=kind is Trouble.REFUSED)

    def _bulk_trouble(self, trouble: PeerTrouble, *, fair: bool) -> None:
        self.troubles[f"bulk_{trouble.kind}"] += 1
        _log.debug("peer %s: %s", self._node, trouble)
        if not trouble.clean and (fair or trouble.kind != "silent"):
            self.breaker.trouble(trouble.kind)
