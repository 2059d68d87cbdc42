"""How long a transfer may hold blocks (or a slot) of ours without progress.

Every lease has the same TTL, so the one that was renewed longest ago expires first: one timer serves all.
What an expired lease held is given back; the transfer ends as a miss at the other side.

Threads: the IO thread.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable


class TransferLease:
    """Granted by TransferLeases; `expired` is called once unless it ends before."""

    __slots__ = ("_leases", "expired")

    def __init__(self, leases: "TransferLeases", expired: Callable[[], None]) -> None:
        self._leases = leases
        self.expired = expired

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
        self._until: OrderedDict[TransferLease, float] = OrderedDict()
        """The one that expires first is first."""
        self._timer: asyncio.TimerHandle | None = None
        self.expired = 0
        """How many ran out, ever."""

    def __len__(self) -> int:
        return len(self._until)

    def grant(self, expired: Callable[[], None]) -> TransferLease:
        """A lease for the TTL from now."""
        lease = TransferLease(self, expired)
        self._until[lease] = self._loop.time() + self._ttl_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._ttl_s, self._expire)
        return lease

    def renew(self, lease: TransferLease) -> None:
        """As TransferLease."""
        if lease in self._until:
            self._until[lease] = self._loop.time() + self._ttl_s
            self._until.move_to_end(lease)

    def end(self, lease: TransferLease) -> None:
        """As TransferLease. The timer stays: the next transfer will want it."""
        self._until.pop(lease, None)

    def close(self) -> None:
        """No lease expires any more."""
        self._until.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._until:
            lease, until = next(iter(self._until.items()))
            if until > now:
                self._timer = self._loop.call_at(until, self._expire)
                return
            del self._until[lease]
            self.expired += 1
            lease.expired()
