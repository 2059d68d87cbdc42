"""The checker: every block that was committed, every read that was made, and what must hold of them.

1. No read ever returned other bytes than those of the block that was asked for.
2. A read ends by its deadline, unless its own node was stopped meanwhile.
3. What nobody wrote, nobody reads.
4. A block that two failure domains acknowledged is never lost: whenever the cluster has come to rest it
   has two copies again, after one node is gone for good it has one, and every node can read it (as far as all
   blocks before it in its chain had two copies as well).

Threads: any.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.cluster_faults.blocks import ChainId

GRACE_S = 0.75
"""For a machine that has more to do than it can, after the deadline of a read."""


@dataclass(frozen=True, slots=True)
class Read:
    """What one node said about one read. `disturbed`: it was stopped in between, so its times say nothing."""

    node: int
    chain: ChainId
    restored: int
    wrong: tuple[int, ...]
    took_s: float
    deadline_s: float
    disturbed: bool = False


@dataclass(slots=True)
class _Known:
    """About one chain."""

    author: int
    committed: set[int] = field(default_factory=set)
    ensured: set[int] = field(default_factory=set)
    """Blocks that a second arena acknowledged, or that were seen in two at once."""


class Ledger:
    """All that one run wrote and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains: dict[ChainId, _Known] = {}
        self.violations: list[str] = []
        self.reads = 0
        self.hits = 0
        self.restored_blocks = 0

    def begun(self, chain: ChainId, node: int) -> None:
        """A node is about to write a chain; from now on, blocks of it may be found."""
        with self._lock:
            self._chains[chain] = _Known(node)

    def committed(self, chain: ChainId, blocks: Iterable[int]) -> None:
        """Its author said that it committed these."""
        with self._lock:
            self._chains[chain].committed.update(blocks)

    def twice(self, chain: ChainId, block: int) -> None:
        """A second failure domain acknowledged that it has this block."""
        with self._lock:
            self._chains[chain].ensured.add(block)

    def read(self, read: Read) -> None:
        """Check a read and count it."""
        with self._lock:
            self.reads += 1
            self.hits += read.restored > 0
            self.restored_blocks += read.restored
            at = f"node {read.node}, {read.chain}"
            if read.wrong:
                self.violations.append(f"{at}: blocks {list(read.wrong)} came with other bytes")
            if not read.disturbed and read.took_s > read.deadline_s + GRACE_S:
                self.violations.append(f"{at}: took {read.took_s:.2f} s, deadline {read.deadline_s:.2f} s")
            if read.restored and read.chain not in self._chains:
                self.violations.append(f"{at}: nobody wrote it, and {read.restored} blocks came")

    def seen(self, held: Mapping[int, Mapping[ChainId, set[int]]]) -> None:
        """What is in the arenas of each node right now. What is in two of them must never be lost."""
        with self._lock:
            for chain, copies in _copies(held).items():
                known = self._chains.get(chain)
                if known is not None:
                    known.ensured.update(block for block, count in copies.items() if count >= 2)

    def at_rest(self, held: Mapping[int, Mapping[ChainId, set[int]]]) -> None:
        """All nodes are there and have nothing left to copy: what ever had two copies has two."""
        self.seen(held)
        with self._lock:
            copies = _copies(held)
            for chain, known in self._chains.items():
                have = {block for block, count in copies.get(chain, {}).items() if count >= 2}
                if thin := known.ensured - have:
                    text = f"{chain}: blocks {sorted(thin)} had two copies, and have fewer at rest"
                    self.violations.append(text)

    def lost(self, held: Mapping[int, Mapping[ChainId, set[int]]]) -> None:
        """One node is gone for good: what had two copies must be in an arena of those that are left."""
        with self._lock:
            copies = _copies(held)
            for chain, known in self._chains.items():
                if gone := known.ensured - set(copies.get(chain, {})):
                    self.violations.append(f"{chain}: blocks {sorted(gone)} had two copies, and none is left")

    def chains(self) -> list[ChainId]:
        """All that were begun, oldest first."""
        with self._lock:
            return list(self._chains)

    def readable(self, chain: ChainId) -> int:
        """How many blocks from the first on must be readable wherever there is no fault."""
        with self._lock:
            ensured = self._chains[chain].ensured
            return next(block for block in range(chain.blocks + 1) if block not in ensured)

    def unreadable(self, node: int, chain: ChainId, got: int) -> None:
        """A node without a fault got `got` blocks, less than must be readable."""
        with self._lock:
            known = self._chains[chain]
            self.violations.append(
                f"node {node}, {chain} (written by node {known.author}): {got} blocks readable, "
                f"{len(known.ensured)} had two copies"
            )

    def totals(self) -> tuple[int, int]:
        """Blocks that their authors committed, and blocks that had two copies."""
        with self._lock:
            known = self._chains.values()
            return sum(len(one.committed) for one in known), sum(len(one.ensured) for one in known)


def _copies(held: Mapping[int, Mapping[ChainId, set[int]]]) -> dict[ChainId, dict[int, int]]:
    counts: dict[ChainId, dict[int, int]] = {}
    for chains in held.values():
        for chain, blocks in chains.items():
            of_chain = counts.setdefault(chain, {})
            for block in blocks:
                of_chain[block] = of_chain.get(block, 0) + 1
    return counts
