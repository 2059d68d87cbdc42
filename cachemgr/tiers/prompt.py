"""How far the blocks of one prompt have come, and what is known of who has the others.

    hashes   0 … first │ usable by now │ at │ wanted: missing from here on │ … n
                       └──── saved ────┘    └── a tier's reach: it has the wanted ones up to there

`at` only moves on: over what is here, and over what is being written here, which nobody else needs to bring.

Threads: the IO loop.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HostStore
from cachemgr.shard import BlockAddress, address_of
from cachemgr.tiers.economy import Allowance

_LOOK = 64
"""Blocks looked at together: a prompt that comes block by block is not looked through each time."""

_NONE: Container[BlockHash] = ()


@dataclass(slots=True)
class Reach:
    """What a tier said: it has what was wanted in [first, end); if `lacks`, it lacks the block at `end`."""

    first: int
    end: int
    lacks: bool

    def covers(self, at: int) -> bool:
        """True if it has block `at`."""
        return self.first <= at < self.end

    def denies(self, at: int) -> bool:
        """True if it lacks block `at`."""
        return self.lacks and at == self.end


class Prompt:
    """One request's fetch."""

    __slots__ = ("allowance", "at", "declined", "first", "hashes", "over", "reach", "said", "store")

    def __init__(
        self,
        store: HostStore,
        hashes: Sequence[BlockHash],
        *,
        allowance: Allowance,
        on_their_way: Container[BlockHash] = _NONE,
    ) -> None:
        """`allowance` is that of the whole prompt; less is missing."""
        self.store = store
        self.hashes = hashes
        self.allowance = allowance
        self.first = self.at = 0
        """The first block that is not usable: when it began, and now."""
        self.reach: dict[str, Reach] = {}
        self.declined: set[str] = set()
        """Tiers that are not asked for this prompt (any more)."""
        self.over = False
        """The store goes away."""
        self.said: list[str] = []
        """What is known and was decided, for whoever reads the log."""
        self.move_on(on_their_way)
        self.first = self.at
        allowance.blocks = self.left

    @property
    def saved(self) -> int:
        """Blocks that are usable since it began."""
        return self.at - self.first

    @property
    def left(self) -> int:
        """Blocks that are not usable yet."""
        return len(self.hashes) - self.at

    def move_on(self, on_their_way: Container[BlockHash] = _NONE) -> bool:
        """Go to the first block that is missing or on its way; False if there is none.

        A slot is reserved for one that is on its way: the store does not call it missing.
        """
        while self.at < len(self.hashes):
            part = self.hashes[self.at : self.at + _LOOK]
            gone = self.store.missing(part)
            stop = gone[0] if gone else len(part)
            if on_their_way:
                stop = next((at for at in range(stop) if part[at] in on_their_way), stop)
            self.at += stop
            if stop < len(part):
                break
        return self.at < len(self.hashes)

    def wanted(self, on_their_way: Container[BlockHash] = _NONE) -> tuple[list[BlockAddress], int]:
        """What is missing from `at` on, up to a block that is on its way or the end; and where that is."""
        end = len(self.hashes)
        if on_their_way:
            end = next((at for at in range(self.at, end) if self.hashes[at] in on_their_way), end)
        gone = self.store.missing(self.hashes[self.at : end])
        return [address_of(self.hashes, self.at + at) for at in gone], end

    def all_here(self, first: int) -> bool:
        """Is what looked usable from block `first` on really here, and not still being written?"""
        shards = self.store.hold(self.hashes[first : self.at])
        self.store.let_go([shard for shard in shards if shard is not None])
        return None not in shards

    def knows(self, tier: str) -> bool:
        """Is it known whether that tier has block `at`?"""
        reach = self.reach.get(tier)
        return reach is not None and (reach.covers(self.at) or reach.denies(self.at))

    def heard(self, tier: str, wanted: Sequence[BlockAddress], end: int, *, has: int) -> None:
        """The tier has so many leading ones of `wanted`, which were all up to `end`."""
        lacks = has < len(wanted)
        first = wanted[0].index if wanted else self.at
        self.reach[tier] = Reach(first, wanted[has].index if lacks else end, lacks)

    def deny(self, tier: str) -> None:
        """It does not give block `at`, whatever it said."""
        self.reach[tier] = Reach(self.at, self.at, lacks=True)
