"""How long a transfer may hold blocks (or a slot) of ours without progress.

What an expired lease held is given back; the transfer ends as a miss at the other side. One timer serves all
leases, and progress costs nothing: it is asked for when a lease would expire.

Threads: the IO thread.
"""

import asyncio
from collections.abc import Callable

_TIMERS_PER_TTL = 8
"""How late a lease may be found to have expired, as a part of its TTL."""


class TransferLease:
    """Granted by TransferLeases; `expired` is called once unless it ends before."""

    __slots__ = ("_leases", "expired", "progress", "renewed_at")

    def __init__(
        self, leases: "TransferLeases", expired: Callable[[], None], progress: Callable[[], float] | None
    ) -> None:
        self._leases = leases
        self.expired = expired
        self.progress = progress
        self.renewed_at = 0.0

    def renew(self) -> None:
        """There was progress. Nothing if the lease is over."""
        self._leases.renew(self)

    def end(self) -> None:
        """The transfer is over. Idempotent."""
        self._leases.end(self)


class TransferLeases:
    """All leases of one server."""

    def __init__(self, ttl_s: float, *, loop: asyncio.AbstractEventLoop) -> None:
        self._ttl_s = ttl_s
        self._loop = loop
        self._granted: set[TransferLease] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.expired = 0
        """How many ran out, ever."""

    def __len__(self) -> int:
        return len(self._granted)

    def grant(
        self, expired: Callable[[], None], *, progress: Callable[[], float] | None = None
    ) -> TransferLease:
        """A lease for the TTL from now, and from whenever `progress` says there was some (loop seconds)."""
        lease = TransferLease(self, expired, progress)
        lease.renewed_at = self._loop.time()
        self._granted.add(lease)
        if self._timer is None:
            self._timer = self._loop.call_later(self._ttl_s, self._expire)
        return lease

    def renew(self, lease: TransferLease) -> None:
        """As TransferLease."""
        lease.renewed_at = self._loop.time()

    def end(self, lease: TransferLease) -> None:
        """As TransferLease. The timer stays: the next transfer will want it."""
        self._granted.discard(lease)

    def close(self) -> None:
        """No lease expires any more."""
        self._granted.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        first = now + self._ttl_s
        for lease in tuple(self._granted):
            if lease.progress is not None:
                lease.renewed_at = max(lease.renewed_at, lease.progress())
            until = lease.renewed_at + self._ttl_s
            if until > now:
                first = min(first, until)
            elif lease in self._granted:  # one that expired just now may have ended others
                self._granted.discard(lease)
                self.expired += 1
                lease.expired()
        if self._granted:
            pause = max(first - now, self._ttl_s / _TIMERS_PER_TTL)
            self._timer = self._loop.call_later(pause, self._expire)
