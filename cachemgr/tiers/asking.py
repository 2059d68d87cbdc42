"""Asks several tiers at once how much of a prompt they have.

Who answers first that he has some is not held up by the others: they get as long again as he took, and are
passed by for this block then. A tier that has not answered when the fetch would be cut is not asked again for
this prompt.

Threads: the IO loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cachemgr.shard import BlockAddress
from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.economy import TRIAL_STAKE, Worth, worth
from cachemgr.tiers.fetch_cost import FetchCost, FetchCosts
from cachemgr.tiers.fetch_counts import FetchCounts
from cachemgr.tiers.prompt import Prompt
from cachemgr.tiers.store_tasks import StoreTasks

_PATIENCE_S = 0.001
"""At least so long others may still answer."""


@dataclass(frozen=True, slots=True)
class _Asked:
    name: str
    cost: FetchCost
    until: float


class Asking:
    """One per TieredFetch."""

    def __init__(
        self,
        tasks: StoreTasks,
        *,
        clock: Callable[[], float],
        costs: FetchCosts,
        counts: Mapping[str, FetchCounts],
    ) -> None:
        self._tasks = tasks
        self._clock = clock
        self._costs = costs
        self._counts = counts

    async def ask(
        self, prompt: Prompt, tiers: Sequence[LowerTier], *, wanted: Sequence[BlockAddress], end: int
    ) -> None:
        """`wanted`: what is missing up to `end`. What they answer is the prompt's `reach` then."""
        if not wanted:
            return
        began = self._clock()
        asked: dict[asyncio.Task[int], _Asked] = {}
        for tier in tiers:
            about = self._about(prompt, tier, now=began)
            known = tier.known(prompt.store, wanted, deadline=about.until)
            asked[self._tasks.begin(prompt.store, known)] = about
        try:
            silent = await self._answers(prompt, asked, wanted=wanted, end=end, began=began)
        finally:
            for task in asked:
                task.cancel()
        for about in silent:
            self._silent(prompt, about, began=began)

    def _about(self, prompt: Prompt, tier: LowerTier, *, now: float) -> _Asked:
        cost = self._costs.of(tier.name, prompt.store.payload_nbytes)
        value = worth(cost, prompt.left, block_s=prompt.allowance.block_s)
        counts = self._counts[tier.name]
        counts.asks += 1
        counts.trials += value is Worth.TRIAL
        allowance = prompt.allowance
        if value is Worth.TRIAL:
            allowance = allowance.part(TRIAL_STAKE, now=now)
        return _Asked(tier.name, cost, allowance.until())

    async def _answers(
        self,
        prompt: Prompt,
        asked: Mapping[asyncio.Task[int], _Asked],
        *,
        wanted: Sequence[BlockAddress],
        end: int,
        began: float,
    ) -> list[_Asked]:
        """Wait for answers; who did not answer."""
        waiting = set(asked)
        patience = float("inf")
        while waiting and not prompt.over:
            now = self._clock()
            left_s = min(patience, max(asked[task].until for task in waiting)) - now
            if left_s <= 0:
                break
            done, waiting = await asyncio.wait(
                waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            took_s = self._clock() - began
            for task in done:
                has = self._heard(task, asked[task], took_s=took_s)
                prompt.heard(asked[task].name, wanted, end, has=has)
                if has:
                    patience = min(patience, began + took_s + max(_PATIENCE_S, took_s))
                else:
                    prompt.said.append(f"{asked[task].name} has none")
        return [asked[task] for task in waiting]

    @staticmethod
    def _heard(task: asyncio.Task[int], about: _Asked, *, took_s: float) -> int:
        if task.cancelled():
            return 0
        about.cost.answered(took_s)
        return 0 if task.exception() is not None else task.result()

    def _silent(self, prompt: Prompt, about: _Asked, *, began: float) -> None:
        now = self._clock()
        about.cost.silent(now - began)
        prompt.said.append(f"{about.name} did not answer within {1e3 * (now - began):.1f} ms")
        if now < about.until:
            prompt.deny(about.name)
            return
        prompt.declined.add(about.name)
        if now >= prompt.allowance.deadline:
            self._counts[about.name].deadlines += 1
        else:
            self._counts[about.name].cut += 1
