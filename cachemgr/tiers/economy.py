"""Whether fetching pays: the prefix with the least expected time to the first token, and when to give up.

Of a prompt's n blocks that are missing, k are fetched and the others computed. What that takes:

    fetch(k) + (n − k) · block_s            `plan`: the k for which that is least: none, some, or all

While a fetch goes on, it saved `block_s` for every block that is usable: it is ahead of computing, or behind.
It is cut when it is behind by a share of n · block_s, what all would have taken: so a tier that stalls costs
that share of the time to the first token, whatever was known of it. One that was ahead and stalls is cut when
it lost a quarter of its lead and that share (`Allowance`).

Threads: the IO loop; pure but for `Allowance`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from cachemgr.tiers.fetch_cost import FetchCost, Price

AT_STAKE = 0.08
"""How far a fetch may be behind. A tenth is promised; the rest is for what is not seen from here: the way to
this loop and back, and a step of the engine that is under way."""

PEERS_STAKE = 0.04
"""Of that, what peers may take where there are tiers below to be asked after them."""

_LEAD_AT_STAKE = 0.25

TRIAL_STAKE = 0.02
"""What is risked to see whether a tier is still as slow as it was."""


class Worth(Enum):
    """Is a tier to be asked?"""

    PAYS = "pays"
    TRIAL = "trial"
    """It did not pay when it was measured, but that is a while ago."""
    DOES_NOT_PAY = "does not pay"


def worth(cost: FetchCost, blocks: int, *, block_s: float | None) -> Worth:
    """If it has all of so many blocks, would asking it be worth while?"""
    if block_s is None or _pays(cost.measured, blocks, block_s, stake=AT_STAKE):
        return Worth.PAYS
    return Worth.TRIAL if _pays(cost.expected, blocks, block_s, stake=TRIAL_STAKE) else Worth.DOES_NOT_PAY


def _pays(price: Price, blocks: int, block_s: float, *, stake: float) -> bool:
    """It is quicker, and its first block comes before it would be cut."""
    all_s = blocks * block_s
    in_time = price.ask_s + price.fetch_s(1) <= stake * all_s
    return in_time and price.ask_s + price.fetch_s(blocks) < all_s


@dataclass(slots=True)
class Allowance:
    """Until when a fetch may go on. Seconds of the monotonic clock."""

    began: float
    deadline: float
    blocks: int
    """Missing at first, with those behind them: what would be computed without a fetch."""
    block_s: float | None
    """What computing one takes; None: the deadline alone counts."""
    stake: float = AT_STAKE
    whole: "Allowance | None" = None
    """Of which this is a part."""
    saved: int = 0
    """Of the blocks, how many are usable by now, since it began."""
    since: float = field(init=False)
    """When the last of them came."""

    def __post_init__(self) -> None:
        self.since = self.began

    def part(self, stake: float, *, now: float) -> "Allowance":
        """For something that begins now and may lose less."""
        return Allowance(now, self.deadline, self.blocks, self.block_s, stake, whole=self)

    def came(self, blocks: int, *, at: float) -> None:
        """So many are usable since it began, the last of them since then."""
        if blocks > self.saved:
            self.saved, self.since = blocks, at

    def until(self) -> float:
        """When it is to be cut, if no more blocks come."""
        if self.block_s is None:
            return self.deadline
        lead_s = self.saved * self.block_s - (self.since - self.began)
        lost_s = self.stake * self.blocks * self.block_s
        until = self.since + lost_s + (_LEAD_AT_STAKE * lead_s if lead_s > 0 else lead_s)
        return min(until, self.deadline if self.whole is None else self.whole.until())


@dataclass(frozen=True, slots=True)
class Supply:
    """What one tier has of the blocks that are wanted, from the first one on."""

    price: Price
    blocks: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to fetch from where, in order: (which supply, up to how many blocks)."""

    steps: tuple[tuple[int, int], ...]
    seconds: float
    """Until the first token, with what is computed."""


def plan(supplies: Sequence[Supply], ends: Sequence[int], *, block_s: float | None) -> Plan:
    """The steps that lead to the first token soonest; of equals, more blocks, from the earlier supplies.

    `ends[m]`: how long the usable prefix is once the first m wanted blocks are here, m = 0 … all of them; the
    last one is the whole prompt's. `block_s` None: as much as there is, as quickly as can be.

    Prices are linear: it never pays to change from one supply to another but where one ends.
    """
    best = _Path(0.0, ())
    least, steps = _compute_s(ends, 0, block_s), best.steps
    going: dict[int, _Path] = {}
    here = 0
    for end in sorted({supply.blocks for supply in supplies if supply.blocks}):
        going = {
            at: _enter(supply, best, going.get(at))
            for at, supply in enumerate(supplies)
            if supply.blocks >= end
        }
        lines = [(path.seconds, supplies[at].price.block_s, at) for at, path in going.items()]
        last: tuple[int, int] | None = None
        for blocks in range(here + 1, end + 1):
            fetch_s, at = min((begun_s + (blocks - here) * each_s, at) for begun_s, each_s, at in lines)
            seconds = fetch_s + _compute_s(ends, blocks, block_s)
            if block_s is None or seconds <= least:
                least, last = seconds, (at, blocks)
        if last is not None:
            steps = _with(going[last[0]].steps, *last)
        going = {
            at: _Path(begun_s + (end - here) * each_s, _with(going[at].steps, at, end))
            for begun_s, each_s, at in lines
        }
        best = min(going.values(), key=lambda path: path.seconds)
        here = end
    return Plan(steps, least)


@dataclass(frozen=True, slots=True)
class _Path:
    """The quickest way to fetch the first blocks."""

    seconds: float
    steps: tuple[tuple[int, int], ...]


def _enter(supply: Supply, best: _Path, gone_on: _Path | None) -> _Path:
    """Go on with this supply, or change to it."""
    begun = _Path(best.seconds + supply.price.begin_s, best.steps)
    return gone_on if gone_on is not None and gone_on.seconds <= begun.seconds else begun


def _with(steps: tuple[tuple[int, int], ...], at: int, blocks: int) -> tuple[tuple[int, int], ...]:
    """Steps that go on to so many blocks with one more, or with the last one."""
    return (*steps[:-1], (at, blocks)) if steps and steps[-1][0] == at else (*steps, (at, blocks))


def _compute_s(ends: Sequence[int], blocks: int, block_s: float | None) -> float:
    return 0.0 if block_s is None else (ends[-1] - ends[blocks]) * block_s
