"""A prompt's missing blocks, each from where it costs least, and none that is quicker to compute.

    fetch ─┬ on its way already          wait for that flight
           ├ peers, once                 they publish into the store; what they lack is missing still
           ├ ask all tiers that may pay  `known`: how far does each reach from the first missing block on
           └ fetch from the tier that the plan names, as far as it says; then look again

Each turn moves the first missing block on, or learns who does not have it: it ends when nobody has it, when
the rest does not pay, when the fetch is too far behind (`economy`), or at the deadline. What came is used.

Invariants
- `fetch` ends by its deadline whatever peers and tiers do: nothing is awaited without a limit.
- A block (per store) is brought by one flight at a time (`flights`); waiters come and go.

Threads: the IO loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress
from cachemgr.tiers.asking import Asking
from cachemgr.tiers.choosing import Choosing
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.economy import AT_STAKE, PEERS_STAKE, TRIAL_STAKE, Allowance, Worth
from cachemgr.tiers.fetch_cost import FetchCosts
from cachemgr.tiers.fetch_counts import FetchCounts
from cachemgr.tiers.flights import Came, Flight, Flights
from cachemgr.tiers.prompt import Prompt
from cachemgr.tiers.store_tasks import StoreTasks

log = logging.getLogger(__name__)

PEER = "peer"


class PeerBlocks(Protocol):
    """Other nodes."""

    async def fetch(self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float) -> None:
        """Bring what is missing of a chain into `store` until `deadline`."""
        ...


class TieredFetch:
    """`tiers` in the order in which they are preferred. `close` it before them, and before the peers."""

    def __init__(
        self,
        peers: PeerBlocks | None,
        tiers: Sequence[LowerTier],
        *,
        clock: Callable[[], float],
        came: Came,
    ) -> None:
        self._peers = peers
        self._tiers = tiers
        self._clock = clock
        self._costs = FetchCosts(clock=clock)
        self._counts = {name: FetchCounts() for name in (PEER, *(tier.name for tier in tiers))}
        self._in_trouble: set[str] = set()
        self._tasks = StoreTasks()
        self._flights = Flights(self._tasks, clock=clock, came=came)
        self._choosing = Choosing(costs=self._costs, counts=self._counts)
        self._asking = Asking(self._tasks, clock=clock, costs=self._costs, counts=self._counts)
        self._prompts: set[Prompt] = set()
        self._closed = False

    async def fetch(
        self, store: HostStore, hashes: Sequence[BlockHash], *, deadline: float, block_s: float | None
    ) -> None:
        """Bring what is missing of the chain as far as it pays, until `deadline`.

        `block_s`: what computing a block takes; None: all that there is.
        """
        self._notice_troubles()
        allowance = Allowance(self._clock(), deadline, len(hashes), block_s)
        prompt = Prompt(store, hashes, allowance=allowance, on_their_way=self._flights.names(store))
        if self._closed or not prompt.left:
            return
        self._prompts.add(prompt)
        try:
            await self._bring(prompt)
        finally:
            self._prompts.discard(prompt)
            self._explain(prompt)

    def counters(self) -> dict[str, dict[str, float]]:
        """By tier, peers among them: totals (`tier_…_total`) and gauges (every other name)."""
        return {
            name: counts.totals()
            for name, counts in self._counts.items()
            if name != PEER or self._peers is not None
        }

    @property
    def idle(self) -> bool:
        """True if nothing is on its way."""
        return not len(self._tasks) and not self._prompts

    async def forget(self, store: HostStore) -> None:
        """`store` goes away: nothing here uses it when this returns. Fetches for it end."""
        for prompt in self._prompts:
            prompt.over |= prompt.store is store
        await self._tasks.end(store)

    async def close(self) -> None:
        """End all fetches. Idempotent."""
        self._closed = True
        for prompt in self._prompts:
            prompt.over = True
        await self._tasks.end()

    def _notice_troubles(self) -> None:
        """A tier that works again begins anew: what it took while it broke says nothing of it now."""
        for tier in self._tiers:
            if not tier.usable:
                self._in_trouble.add(tier.name)
            elif tier.name in self._in_trouble:
                self._in_trouble.discard(tier.name)
                self._costs.forget(tier.name)

    async def _bring(self, prompt: Prompt) -> None:
        peers = self._peers
        while prompt.move_on(self._flights.names(prompt.store)) and not prompt.over:
            now = self._clock()
            prompt.allowance.came(prompt.saved, at=now)
            if now >= prompt.allowance.until():
                return
            joined = self._flights.find(prompt.store, prompt.hashes[prompt.at])
            if joined is not None:
                await self._wait_for(prompt, *joined)
            elif peers is not None:
                await self._from_peers(prompt, peers)
                peers = None
            elif unknown := self._choosing.unknown(prompt, self._tiers):
                wanted, end = prompt.wanted(self._flights.names(prompt.store))
                await self._asking.ask(prompt, unknown, wanted=wanted, end=end)
            elif not await self._from_a_tier(prompt):
                return

    async def _wait_for(
        self, prompt: Prompt, flight: Flight, place: int, *, value: Worth = Worth.PAYS
    ) -> None:
        """Wait for what the prompt wants of a flight, from its block at `place` on; or until it is cut."""
        wanted = _in_common(prompt, flight, place)
        counts = self._counts[flight.tier.name]
        if flight.interest:
            counts.joined_blocks += wanted - place
        allowance, saved = prompt.allowance, prompt.saved
        part = allowance if value is Worth.PAYS else allowance.part(TRIAL_STAKE, now=self._clock())
        late = False
        self._flights.join(flight)
        try:
            while not flight.over and flight.came < wanted and not late:
                left_s = part.until() - self._clock()
                late = left_s <= 0
                if not late:
                    await flight.wait(wanted, limit_s=left_s)
                    came = max(0, flight.came - place)
                    allowance.came(saved + came, at=flight.last)
                    if part is not allowance:
                        part.came(came, at=flight.last)
        finally:
            self._flights.leave(flight, late=late)
        prompt.said.append(f"{max(0, flight.came - place)} came in {1e3 * flight.seconds:.1f} ms")
        if late:
            self._count_late(prompt, counts)
            if not flight.interest:
                await self._give_up(prompt, flight.task, first=prompt.at)

    async def _give_up(self, prompt: Prompt, task: asyncio.Task[None], *, first: int) -> None:
        """Go on without what `task` was to bring from block `first` on, if there is time.

        A block that hangs on its way keeps its slot for a while, and looks like one that is being written
        here: what others have behind it would be of no use.
        """
        left_s = prompt.allowance.until() - self._clock()
        await asyncio.wait({task}, timeout=max(0.0, left_s))
        prompt.move_on(self._flights.names(prompt.store))
        prompt.over |= left_s <= 0 or not task.done() or not prompt.all_here(first)

    async def _from_peers(self, prompt: Prompt, peers: PeerBlocks) -> None:
        """Once per prompt; they are cut sooner if a tier can be asked after them."""
        value = self._choosing.to_ask(prompt, PEER)
        if value is Worth.DOES_NOT_PAY:
            return
        counts, began, at = self._counts[PEER], self._clock(), prompt.at
        most = PEERS_STAKE if any(tier.usable for tier in self._tiers) else AT_STAKE
        part = prompt.allowance.part(TRIAL_STAKE if value is Worth.TRIAL else most, now=began)
        counts.asks += 1
        counts.trials += value is Worth.TRIAL
        work = peers.fetch(prompt.store, prompt.hashes, deadline=prompt.allowance.deadline)
        task = self._tasks.begin(prompt.store, work)
        late = False
        try:
            while not task.done() and not late:
                left_s = part.until() - self._clock()
                late = left_s <= 0
                if not late:
                    await asyncio.wait({task}, timeout=left_s)
                    prompt.move_on(self._flights.names(prompt.store))
                    prompt.allowance.came(prompt.saved, at=self._clock())
                    part.came(prompt.at - at, at=self._clock())
        finally:
            task.cancel()
        blocks, seconds = prompt.at - at, self._clock() - began
        self._note_peers(prompt, blocks, seconds=seconds, late=late)
        prompt.said.append(f"peers brought {blocks} in {1e3 * seconds:.1f} ms")
        if late:
            await self._give_up(prompt, task, first=at)

    def _note_peers(self, prompt: Prompt, blocks: int, *, seconds: float, late: bool) -> None:
        cost, counts = self._choosing.cost(prompt, PEER), self._counts[PEER]
        counts.fetches += bool(blocks)
        counts.landed(blocks, blocks * prompt.store.payload_nbytes, seconds)
        if late:
            self._count_late(prompt, counts)
            if blocks:
                cost.slow(seconds, blocks=blocks)
            else:
                cost.silent(seconds)
        elif blocks:
            cost.fetched_all(blocks, seconds=seconds)
        else:
            cost.answered(seconds)

    async def _from_a_tier(self, prompt: Prompt) -> bool:
        """Fetch what pays most, as far as one tier goes; False if nothing does, or nobody has it."""
        wanted, end = prompt.wanted(self._flights.names(prompt.store))
        tiers = self._choosing.giving(prompt, self._tiers)
        if not wanted:
            return True  # it came at this moment: look again
        if not tiers:
            return False
        ends = [*(block.index - prompt.at for block in wanted), end - prompt.at]
        has = [sum(block.index < prompt.reach[tier.name].end for block in wanted) for tier in tiers]
        choice = self._choosing.choose(prompt, tiers, has=has, ends=ends)
        if choice is None:
            return False
        await self._fetch(prompt, choice.tier, wanted[: choice.blocks], value=choice.worth)
        return True

    async def _fetch(
        self, prompt: Prompt, tier: LowerTier, blocks: Sequence[BlockAddress], *, value: Worth
    ) -> None:
        counts = self._counts[tier.name]
        counts.fetches += 1
        counts.trials += value is Worth.TRIAL
        prompt.said.append(f"{len(blocks)} from {tier.name}")
        flight = self._flights.begin(
            tier,
            prompt.store,
            blocks,
            deadline=prompt.allowance.deadline,
            cost=self._choosing.cost(prompt, tier.name),
            counts=counts,
        )
        await self._wait_for(prompt, flight, 0, value=value)
        prompt.move_on()
        if prompt.at <= blocks[-1].index:
            prompt.deny(tier.name)

    def _count_late(self, prompt: Prompt, counts: FetchCounts) -> None:
        if self._clock() >= prompt.allowance.deadline:
            counts.deadlines += 1
        else:
            counts.cut += 1

    def _explain(self, prompt: Prompt) -> None:
        """One line per fetch."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        allowance = prompt.allowance
        computing = "" if allowance.block_s is None else f", {1e3 * allowance.block_s:.1f} ms each to compute"
        log.debug(
            "%d blocks, %d here, %d missing%s: %s; %d usable after %.1f ms",
            len(prompt.hashes),
            prompt.first,
            allowance.blocks,
            computing,
            "; ".join(prompt.said) or "nobody to ask",
            prompt.at,
            1e3 * (self._clock() - allowance.began),
        )


def _in_common(prompt: Prompt, flight: Flight, place: int) -> int:
    """How many blocks of a flight must come, from its front, until all that the prompt wants are here."""
    for at in range(place, len(flight.blocks)):
        block = flight.blocks[at]
        if block.index >= len(prompt.hashes) or prompt.hashes[block.index] != block.hash:
            return at
    return len(flight.blocks)
