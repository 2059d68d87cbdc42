"""What callers hold: a lease on blocks they read, a reservation for a block they write.

A lease that waits for blocks from elsewhere ends its wait once, by whichever comes first:

    done         the tiers beyond are: what of the chain is known then is pinned as well, and it is ready
    deadline     seen when somebody asks `ready`: the same, and interest is given up
    release      nothing more is pinned, interest is given up, and a later `done` finds nothing to do
"""

from collections.abc import Callable, Sequence
from threading import Lock

from cachemgr.arena import Arena
from cachemgr.contract import BlockHash, RemoteTiers
from cachemgr.host_tier import HostTier
from cachemgr.shard import BlockAddress


class SlotLease:
    """Pins slots, in chain order, until released.

    Releasing twice, or from two threads at once, unpins once.
    """

    __slots__ = ("_held", "blocks", "hashes", "owner", "tier")

    def __init__(
        self, slots: list[int], hashes: Sequence[BlockHash], *, owner: object, tier: HostTier
    ) -> None:
        self.hashes = hashes
        self.owner = owner
        self.tier = tier
        self.blocks = len(slots)
        """How many leading blocks of the asked chain are pinned."""
        self._held = [slots]

    @property
    def ready(self) -> bool:
        """Always: nothing is on its way."""
        return True

    @property
    def slots(self) -> list[int]:
        """The pinned slots. RuntimeError once released."""
        if not self._held:
            raise RuntimeError("this lease was released: its blocks may be gone")
        return self._held[0]

    def release(self) -> None:
        """Unpin. Idempotent."""
        try:
            slots = self._held.pop()  # one bytecode under the interpreter lock: only one caller gets them
        except IndexError:
            return
        self.tier.table.unpin(slots)


class FetchingLease(SlotLease):
    """A lease that waits, until `deadline` at the latest, for the blocks it does not have yet.

    Its lock is held while it pins what came: tens of microseconds, and never while anything is called that
    could call back.
    """

    __slots__ = ("_block_s", "_clock", "_deadline", "_give_up", "_lock", "_namespace", "_since", "_waiting")

    def __init__(
        self,
        slots: list[int],
        hashes: Sequence[BlockHash],
        *,
        owner: object,
        tier: HostTier,
        clock: Callable[[], float],
        deadline: float,
        block_s: float | None = None,
        namespace: str = "",
    ) -> None:
        super().__init__(slots, tuple(hashes), owner=owner, tier=tier)
        self._clock = clock
        self._deadline = deadline
        self._block_s = block_s
        self._namespace = namespace
        self._since = clock()
        self._lock = Lock()
        self._waiting = True
        self._give_up: Callable[[], None] | None = None

    def wait_for(self, remote: RemoteTiers) -> None:
        """Let `remote` fetch. What it raises is its bug: it passes through, and the lease is released."""
        try:
            self._give_up = remote.fetch(
                self.hashes, deadline=self._deadline, done=self._done, block_s=self._block_s
            )
        except BaseException:
            self.release()
            raise

    @property
    def ready(self) -> bool:
        """See Lease."""
        if self._waiting and self._clock() >= self._deadline and self._end_wait(timed_out=True):
            self._lose_interest()
        return not self._waiting

    def release(self) -> None:
        """See Lease. Any thread, while blocks come or after."""
        with self._lock:
            waited, self._waiting = self._waiting, False
        if waited:
            self._lose_interest()
        super().release()

    def _done(self) -> None:
        self._end_wait(timed_out=False)

    def _end_wait(self, *, timed_out: bool) -> bool:
        """Pin what came; False if the wait was over before."""
        with self._lock:
            if not self._waiting:
                return False
            waited_s = self._clock() - self._since
            came = self.tier.table.pin_fetched(
                self.hashes[self.blocks :],
                waited_s=waited_s,
                timed_out=timed_out,
                namespace=self._namespace,
                front=self._held[0],
            )
            self._held[0] += came
            self.blocks += len(came)
            self._waiting = False  # last: who sees it reads `blocks` without the lock
            return True

    def _lose_interest(self) -> None:
        if self._give_up is not None:
            self._give_up()


class Reservation:
    """A slot being written; its block is announced and not visible."""

    __slots__ = ("address", "arena", "hashes", "open", "payload", "slot", "tier")

    def __init__(
        self,
        slot: int,
        *,
        address: BlockAddress,
        hashes: Sequence[BlockHash],
        arena: Arena,
        tier: HostTier,
    ) -> None:
        self.slot = slot
        self.payload = arena.payload(slot)
        self.address = address
        self.hashes = hashes
        self.arena = arena
        self.tier = tier
        self.open = True

    def close(self) -> None:
        """Commit and abort call this first. RuntimeError if one of them was called before."""
        if not self.open:
            raise RuntimeError("this block was committed or aborted before")
        self.open = False
