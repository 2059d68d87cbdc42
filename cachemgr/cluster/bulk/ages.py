"""Ends connections that certificates opened: when there are new certificates, and in any case after a while.

A connection is first asked to take nothing new, and ended if it is still there after a grace. So none
outlives what let it in by more than `AGE_S` + `GRACE_S`, nor new certificates by much more than `GRACE_S`.

Threads: the IO thread.
"""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from cachemgr.cluster.certificates import Certificates

AGE_S = 600.0
GRACE_S = 10.0
_LOOK_S = 1.0


@dataclass(slots=True)
class _Connection:
    generation: int
    leaves_at: float
    leave: Callable[[], None]
    end: Callable[[], None]
    ends_at: float | None = None


class ConnectionAges:
    """Of the connections of one server or client; nothing happens without certificates."""

    def __init__(self, certificates: Certificates | None, *, loop: asyncio.AbstractEventLoop) -> None:
        self._certificates = certificates
        self._loop = loop
        self._connections: dict[Hashable, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def generation(self) -> int:
        """Of the certificates in force: of a connection that begins now."""
        return self._certificates.generation if self._certificates is not None else 0

    def add(
        self, connection: Hashable, *, generation: int, leave: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """`leave` asks it to take nothing new, `end` ends it at once."""
        if self._certificates is None:
            return
        self._connections[connection] = _Connection(generation, self._loop.time() + AGE_S, leave, end)
        if self._timer is None:
            self._look()

    def discard(self, connection: Hashable) -> None:
        """It has ended. Nothing if it is not known."""
        self._connections.pop(connection, None)

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._connections.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now = self._loop.time()
        for connection in tuple(self._connections.values()):  # what is called may end it
            if connection.ends_at is not None:
                if now >= connection.ends_at:
                    connection.end()
            elif connection.generation != self.generation or now >= connection.leaves_at:
                connection.ends_at = now + GRACE_S
                connection.leave()
        self._timer = self._loop.call_later(_LOOK_S, self._look) if self._connections else None
