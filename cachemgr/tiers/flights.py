"""Blocks on their way from a tier: a block is asked for once, whoever waits for it.

A flight brings a run of blocks from one tier. Whoever wants one of them meanwhile waits for that flight, and
leaves by himself: as soon as his blocks are here, or when he has waited long enough. It goes on while anybody
waits, and ends when nobody does.

A tier brings blocks in order and counts them: a waiter is told when as many have come as he wants of the
front of the run. Blocks that the store would not take are not counted; who waits for more than come is told
at the end.

Invariants
- A block (per store) is in one flight at a time; one that everybody left can be asked for again at once.
- A flight that is over has no block on its way.
- What a flight learned of its tier's speed is noted when it ends, however it ends.

Threads: the IO loop.
"""

import asyncio
from collections.abc import Callable, Sequence

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.fetch_cost import FetchCost
from cachemgr.tiers.fetch_counts import FetchCounts
from cachemgr.tiers.store_tasks import StoreTasks

Came = Callable[[HostStore, Sequence[BlockAddress], LowerTier], None]
"""Hears which blocks a tier brought into a store."""


class Flight:
    """`blocks` come from `tier` into `store`."""

    __slots__ = (
        "_began", "_clock", "_first", "_landed", "_waiting", "blocks", "came", "deadline", "interest", "last",
        "left", "nbytes", "store", "task", "tier",
    )  # fmt: skip

    def __init__(
        self,
        tier: LowerTier,
        store: HostStore,
        blocks: Sequence[BlockAddress],
        *,
        deadline: float,
        clock: Callable[[], float],
        landed: "Callable[[Flight], None]",
    ) -> None:
        """`landed` is called for every block that came."""
        self.tier = tier
        self.store = store
        self.blocks = blocks
        self.deadline = deadline
        self.came = 0
        """How many have come, from the front."""
        self.nbytes = 0
        self.interest = 0
        self.left: str | None = None
        """Why the last one left, if it was not over: `late`, it took too long; or `early`."""
        self._clock = clock
        self._landed = landed
        self._began = self._first = self.last = clock()  # last: when the last one came
        self._waiting: dict[asyncio.Future[None], int] = {}
        self.task: asyncio.Task[None]

    @property
    def over(self) -> bool:
        """Nothing more comes."""
        return self.task.done()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._began

    async def bring(self) -> None:
        """Ask the tier."""
        await self.tier.get(self.store, self.blocks, deadline=self.deadline, arrived=self._arrived)

    async def wait(self, blocks: int, *, limit_s: float) -> None:
        """Until so many have come, it is over, or the time is up."""
        if self.came >= blocks or self.over:
            return
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[told] = blocks
        try:
            await asyncio.wait({told}, timeout=limit_s)
        finally:
            del self._waiting[told]

    def tell(self) -> None:
        """Those whose blocks are here; everyone once it is over."""
        for told, blocks in self._waiting.items():
            if (self.came >= blocks or self.over) and not told.done():
                told.set_result(None)

    def note(self, cost: FetchCost) -> None:
        """How quick it was; one that nobody wanted to the end says only how quickly came what came."""
        first_s, last_s = self._first - self._began, self.last - self._began
        cost.fetched(self.came, first_s=first_s, last_s=last_s)
        early = self.left == "early" or (self.left is None and self.task.cancelled())
        if self.came == len(self.blocks) or early:
            return
        cut = self.left is not None or self._clock() >= self.deadline
        if not self.came:  # one that ended by itself may have brought them all to a store without room
            cost.silent(self.seconds if cut else self.seconds / len(self.blocks))
        elif cut:
            cost.slow(self.seconds - first_s, blocks=self.came)

    def _arrived(self, nbytes: int) -> None:
        self.last = self._clock()
        if not self.came:
            self._first = self.last
        self.came += 1
        self.nbytes += nbytes
        self._landed(self)
        self.tell()


class Flights:
    """All that is under way from the tiers below."""

    def __init__(self, tasks: StoreTasks, *, clock: Callable[[], float], came: Came) -> None:
        self._tasks = tasks
        self._clock = clock
        self._came = came
        self._of: dict[HostStore, dict[BlockHash, tuple[Flight, int]]] = {}

    def __len__(self) -> int:
        """Blocks that can be waited for."""
        return sum(map(len, self._of.values()))

    def find(self, store: HostStore, name: BlockHash) -> tuple[Flight, int] | None:
        """The flight that brings a block, and how many of its blocks come before it."""
        found = self._of.get(store, {}).get(name)
        return found if found is not None and not found[0].over else None

    def names(self, store: HostStore) -> "dict[BlockHash, tuple[Flight, int]]":
        """What is on its way into a store."""
        return self._of.get(store, {})

    def begin(
        self,
        tier: LowerTier,
        store: HostStore,
        blocks: Sequence[BlockAddress],
        *,
        deadline: float,
        cost: FetchCost,
        counts: FetchCounts,
    ) -> Flight:
        """None of the blocks is on its way. Whoever begins it joins it before the loop turns."""
        flight = Flight(tier, store, blocks, deadline=deadline, clock=self._clock, landed=self._one_landed)
        flight.task = self._tasks.begin(store, self._bring(flight))
        names = self._of.setdefault(store, {})
        names.update((block.hash, (flight, at)) for at, block in enumerate(blocks))
        flight.task.add_done_callback(lambda task: self._over(flight, cost, counts))
        return flight

    def join(self, flight: Flight) -> None:
        """One more waits for it."""
        flight.interest += 1

    def leave(self, flight: Flight, *, late: bool) -> None:
        """One less does; `late`: he waited long enough. With the last one, it ends.

        One that brought everything is about to end by itself: cancelled, it would leave its connection with
        something unread.
        """
        flight.interest -= 1
        if not flight.interest and not flight.over and flight.came < len(flight.blocks):
            flight.left = "late" if late else "early"
            flight.task.cancel()
            self._forget(flight, flight.blocks)

    async def _bring(self, flight: Flight) -> None:
        try:
            await flight.bring()
        finally:  # not once it is over: who looks in between would find a block on its way that never comes
            self._forget(flight, flight.blocks)

    def _one_landed(self, flight: Flight) -> None:
        self._forget(flight, flight.blocks[flight.came - 1 : flight.came])

    def _over(self, flight: Flight, cost: FetchCost, counts: FetchCounts) -> None:
        self._forget(flight, flight.blocks)
        flight.note(cost)
        counts.landed(flight.came, flight.nbytes, flight.seconds)
        flight.tell()
        if flight.came:
            self._came(flight.store, flight.blocks, flight.tier)

    def _forget(self, flight: Flight, blocks: Sequence[BlockAddress]) -> None:
        """Nobody is to wait for these any more."""
        names = self._of.get(flight.store, {})
        for block in blocks:
            if (found := names.get(block.hash)) is not None and found[0] is flight:
                del names[block.hash]
        if not names:
            self._of.pop(flight.store, None)
