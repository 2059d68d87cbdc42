"""One `known` or `get` on its way: made on the loop, served by the reader's thread, ended on the loop.

Invariants
- `arrived` is called before the call ends, in order, and never after it was given up.
- Nothing is published after it was given up.

Threads: made, waited for and given up on the loop; `publish` and `end` on the reader's thread.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from cachemgr.host_contract import HostStore, IncomingShard
from cachemgr.shard import BlockAddress

_TELL_S = 0.005
"""The loop is woken no more often: each time costs the reader as much as a tenth of a block."""


class ReadCall:
    """`payload`: bring the blocks; else only count those that are there."""

    __slots__ = (
        "_arrivals", "_arrived", "_loop", "_post_at", "_posted", "_publishing", "blocks", "ended", "given_up",
        "payload", "result", "store",
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
        self.blocks = blocks
        self.payload = payload
        self.result = 0
        """Leading blocks that are there, or were brought or passed by."""
        self.given_up = False
        """Nobody waits any more. Seen by the thread at the next piece."""
        self._publishing = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Nothing of this call uses the store any more."""
        self._arrived = arrived
        self._arrivals: deque[int] = deque()
        self._posted = False
        self._post_at = 0.0

    def give_up(self) -> None:
        """Nothing is published from now on. Waits for one that is being published: microseconds."""
        with self._publishing:
            self.given_up = True

    def publish(self, shard: IncomingShard, header: bytes, *, now: float) -> bool:
        """Publish a block that passed its check, and tell; False, and it is given back, if nobody waits."""
        with self._publishing:
            if self.given_up:
                self.store.abort(shard)
                return False
            self.store.publish(shard, header)
        self._arrivals.append(self.store.payload_nbytes)
        if now >= self._post_at and not self._posted:
            self._post_at = now + _TELL_S
            self._posted = True
            self._post(self._deliver)
        return True

    def end(self) -> None:
        """Nothing uses the store any more."""
        self._post(self._end)

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
        try:
            self._deliver()
        finally:
            if not self.ended.done():
                self.ended.set_result(None)
