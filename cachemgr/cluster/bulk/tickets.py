"""Tickets that open bulk connections: random, for one node, good once and for five seconds.

Invariant: at most a fixed number wait; a new one makes the oldest worthless, so that asking for many costs
nothing. A ticket is looked up, not compared: how long that takes depends on its hash, which is keyed anew in
every process, and says nothing about how much of a guess was right. Threads: the IO thread.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from cachemgr.cluster.bulk.hello import TICKET_NBYTES
from cachemgr.ring import NodeId

TICKET_S = 5.0
_WAITING = 4096


def _random_ticket() -> bytes:
    return secrets.token_bytes(TICKET_NBYTES)


class Tickets:
    """Issued by the control service, redeemed by the bulk server of the same node."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        token: Callable[[], bytes] = _random_ticket,
    ) -> None:
        self._clock = clock
        self._token = token
        self._waiting: OrderedDict[bytes, tuple[NodeId, float]] = OrderedDict()

    def issue(self, node: NodeId) -> bytes:
        """32 bytes that open one connection of `node`."""
        now = self._clock()
        self._forget(now)
        ticket = self._token()
        self._waiting[ticket] = (node, now + TICKET_S)
        return ticket

    def redeem(self, ticket: bytes, node: NodeId) -> bool:
        """True once, for the node it was issued to, in time. Whoever shows it, it is used up."""
        owner, until = self._waiting.pop(ticket, (None, 0.0))
        return owner == node and self._clock() < until

    def _forget(self, now: float) -> None:
        while self._waiting:
            ticket, (_, until) = next(iter(self._waiting.items()))
            if until > now and len(self._waiting) < _WAITING:
                return
            del self._waiting[ticket]
