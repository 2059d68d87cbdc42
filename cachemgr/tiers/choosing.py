"""Who is asked for a prompt's blocks, and which of those who have some brings how many: what pays, or nobody.

Who does not pay is counted once per prompt, and told to whoever reads the log.

Threads: the IO loop.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.economy import Supply, Worth, plan, worth
from cachemgr.tiers.fetch_cost import FetchCost, FetchCosts, Price
from cachemgr.tiers.fetch_counts import FetchCounts
from cachemgr.tiers.prompt import Prompt

_TRY_AGAIN = 100
"""So often another tier is chosen before one is tried again: it may have become the quicker one."""


class Choice(NamedTuple):
    """A tier, how many of the wanted blocks it is to bring, and what that is thought to be worth."""

    tier: LowerTier
    blocks: int
    worth: Worth


class Choosing:
    """One per TieredFetch, as `costs` and `counts` are."""

    def __init__(self, *, costs: FetchCosts, counts: Mapping[str, FetchCounts]) -> None:
        self._costs = costs
        self._counts = counts
        self._passed = dict.fromkeys(counts, 0)
        """How often each had blocks and another one was chosen, since it was."""

    def cost(self, prompt: Prompt, name: str) -> FetchCost:
        """What is known of a tier, or of peers, for blocks of the prompt's size."""
        return self._costs.of(name, prompt.store.payload_nbytes)

    def to_ask(self, prompt: Prompt, name: str) -> Worth:
        """Is it to be asked for what is left of the prompt? It is declined if that cannot pay."""
        value = worth(self.cost(prompt, name), prompt.left, block_s=prompt.allowance.block_s)
        if value is Worth.DOES_NOT_PAY:
            self._decline(prompt, name, "too slow to be asked")
        return value

    def unknown(self, prompt: Prompt, tiers: Sequence[LowerTier]) -> list[LowerTier]:
        """Those of `tiers` that are to be asked whether they have the first missing block."""
        return [
            tier
            for tier in tiers
            if tier.usable
            and tier.name not in prompt.declined
            and not prompt.knows(tier.name)
            and self.to_ask(prompt, tier.name) is not Worth.DOES_NOT_PAY
        ]

    def giving(self, prompt: Prompt, tiers: Sequence[LowerTier]) -> list[LowerTier]:
        """Those of `tiers` that said to have the first missing block."""
        return [
            tier
            for tier in tiers
            if tier.usable
            and tier.name not in prompt.declined
            and (reach := prompt.reach.get(tier.name)) is not None
            and reach.covers(prompt.at)
        ]

    def choose(
        self, prompt: Prompt, tiers: Sequence[LowerTier], *, has: Sequence[int], ends: Sequence[int]
    ) -> Choice | None:
        """What pays most. `has`: how many of the wanted blocks each tier has; `ends`: see `plan`."""
        costs = [self.cost(prompt, tier.name) for tier in tiers]
        for tier, blocks, cost in zip(tiers, has, costs, strict=True):
            prompt.said.append(f"{tier.name} has {blocks} in {1e3 * cost.measured.fetch_s(blocks):.1f} ms")
        block_s = prompt.allowance.block_s
        value = Worth.PAYS
        chosen = plan(_supplies([cost.measured for cost in costs], has), ends, block_s=block_s)
        if not chosen.steps:
            value = Worth.TRIAL
            chosen = plan(_supplies([cost.expected for cost in costs], has), ends, block_s=block_s)
        if not chosen.steps:
            for tier in tiers:
                self._decline(prompt, tier.name, "computing is quicker")
            return None
        at, blocks = chosen.steps[0]
        other = self._passed_over([tier.name for tier in tiers], chosen=at)
        if other is not None and has[other] >= blocks:
            at, value = other, Worth.TRIAL
        return Choice(tiers[at], blocks, value)

    def _decline(self, prompt: Prompt, name: str, why: str) -> None:
        prompt.declined.add(name)
        prompt.said.append(f"{name}: {why}")
        self._counts[name].declined += 1

    def _passed_over(self, names: Sequence[str], *, chosen: int) -> int | None:
        """One that was passed over so often that it is to be tried again in place of the chosen one."""
        self._passed[names[chosen]] = 0
        for at, name in enumerate(names):
            if at != chosen:
                self._passed[name] += 1
                if self._passed[name] >= _TRY_AGAIN:
                    self._passed[name] = 0
                    return at
        return None


def _supplies(prices: Sequence[Price], has: Sequence[int]) -> list[Supply]:
    return [Supply(price, blocks) for price, blocks in zip(prices, has, strict=True)]
