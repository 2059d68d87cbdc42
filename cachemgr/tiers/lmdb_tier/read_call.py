"""One `known` or `get` on its way: made on the loop, served by the readers' threads, ended on the loop.

Invariants
- Blocks are taken in order, each with its record: none is taken after the first that is not there.
- `arrived` is called before the call ends, and never after it was given up.

Threads: made, waited for and given up on the loop; `take`, `came`, `leave` on the readers' threads.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress

_TELL_S = 0.001
"""The loop is woken no more often: each time costs a reader as much as a tenth of a block."""


class ReadCall:
    """`payload`: bring the blocks; else only count those that are there."""

    __slots__ = (
        "_arrivals", "_arrived", "_blocks", "_lock", "_loop", "_over", "_post_at", "_posted", "_servers",
        "_taken", "ended", "given_up", "missed", "payload", "store",
    )  # fmt: skip

    def __init__(
        self,
        store: HostStore,
        blocks: Sequence[BlockAddress],
        *,
        payload: bool,
        arrived: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.store = store
        self.payload = payload
        self.given_up = False
        """Nobody waits any more. Set on the loop, seen by the threads at the next piece."""
        self.missed = False
        """It ended at a block that is not there."""
        self._blocks = blocks
        self._lock = threading.Lock()
        self._taken = 0
        self._over = False
        self._servers = 0
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Nothing of this call uses the store any more."""
        self._arrived = arrived
        self._arrivals: deque[int] = deque()
        self._posted = False
        self._post_at = 0.0

    @property
    def taken(self) -> int:
        """How many leading blocks were found."""
        return self._taken

    @property
    def names(self) -> list[BlockHash]:
        """Of the blocks that were found."""
        return [address.hash for address in self._blocks[: self._taken]]

    @property
    def idle(self) -> bool:
        """True if nobody serves it, and nobody is to."""
        with self._lock:
            return not self._servers and self._done()

    def enter(self) -> bool:
        """Serve it from now on; False if there is nothing left to do."""
        with self._lock:
            if self._done():
                return False
            self._servers += 1
            return True

    def take(self, record: Callable[[BlockHash], bytes | None]) -> tuple[BlockAddress, bytes] | None:
        """The next block and its record; None at the end, or at the first that is not there."""
        with self._lock:
            if self._done():
                return None
            address = self._blocks[self._taken]
            found = record(address.hash)
            if found is None:
                self._over = self.missed = True
                return None
            self._taken += 1
            return address, found

    def stop(self) -> None:
        """Take no more blocks."""
        with self._lock:
            self._over = True

    def came(self, nbytes: int, now: float) -> None:
        """One more block is there."""
        self._arrivals.append(nbytes)
        if now >= self._post_at and not self._posted:
            self._post_at = now + _TELL_S
            self._posted = True
            self._post(self._deliver)

    def leave(self) -> bool:
        """Serve it no more; True for the last one, which ends it."""
        with self._lock:
            self._servers -= 1
            return not self._servers and self._done()

    def end(self) -> None:
        """Nothing uses the store any more."""
        self._post(self._end)

    def _done(self) -> bool:
        return self.given_up or self._over or self._taken >= len(self._blocks)

    def _post(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(what)

    def _deliver(self) -> None:
        self._posted = False  # before the look: what comes after it posts again, or is delivered at the end
        while self._arrivals:
            nbytes = self._arrivals.popleft()
            if not self.given_up:
                self._arrived(nbytes)

    def _end(self) -> None:
        self._deliver()
        if not self.ended.done():
            self.ended.set_result(None)
