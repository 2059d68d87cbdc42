"""Servers that answer and take nothing: full, or not permitted. Said once, tried again after growing pauses.

Threads: the IO loop.
"""

import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

from cachemgr.redis_client import RedisTrouble
from cachemgr.tiers.redis_tier.server import Server

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


class Refusing:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pauses: WeakKeyDictionary[Server, tuple[float, float]] = WeakKeyDictionary()
        """Until when, and how long that is."""

    def now(self, server: Server) -> bool:
        """True while it is no use to offer it anything."""
        known = self._pauses.get(server)
        return known is not None and self._clock() < known[0]

    def refused(self, server: Server, trouble: RedisTrouble) -> None:
        """It refused a block."""
        if self.now(server):
            return  # another block of the same batch
        known = self._pauses.get(server)
        pause_s = FIRST_PAUSE_S if known is None else min(2 * known[1], LONGEST_PAUSE_S)
        self._pauses[server] = (self._clock() + pause_s, pause_s)
        if known is None:
            _log.warning("%s: no blocks are kept there until it takes them", trouble)

    def taken(self, server: Server) -> None:
        """It took one."""
        if self._pauses.pop(server, None) is not None:
            _log.info("Redis at %s takes blocks again", server.address)
