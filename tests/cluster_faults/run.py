"""One run: nodes that write and read all the time, faults from a seed, and the checker over both.

At checkpoints, between faults, everything is healed and nobody writes: the cluster must come to rest, and
what two arenas had must be readable from every node; if a node is then lost with its arenas, from all others.
"""

import contextlib
import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.cluster_faults.blocks import FORMATS, MAX_BLOCKS, ChainId
from tests.cluster_faults.fault_cluster import CUT, SLOW, STALLED, FaultCluster
from tests.cluster_faults.ledger import Ledger
from tests.cluster_faults.node_process import NodeGoneError, NodeProcess
from tests.cluster_faults.ring_changes import RingChanges
from tests.cluster_faults.schedule import RING_CHANGES, Fault, Kind, draw

READ_DEADLINE_S = 1.0
READABLE_S = 10.0
CHECK_EVERY = 5
_PAUSE_S = (0.0, 0.12)
_FIRST_CHAINS = 6
_READ_ONE_IN = 3
"""Chains that the load reads. Readers keep what they fetch, and soon all would have everything: the others
are with their owners and their author alone, until a checkpoint asks."""

_AGAIN_S = 0.3
_UNWRITTEN = 2_000_000
"""From this seed on no chain is ever written."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`chains`: so many are written at most; arenas have room for all of them on every node."""

    seed: int
    nodes: int = 4
    seconds: float = 45.0
    chains: int = 250
    report: Callable[[str], None] = field(default=print)

    @property
    def blocks(self) -> int:
        """Room of each format on each node: half of all chains, and spare. Nothing is ever evicted."""
        return self.chains * MAX_BLOCKS * 2 // 5


class FaultRun:
    """Run it once, then look at `ledger`."""

    def __init__(self, options: RunOptions) -> None:
        self.ledger = Ledger()
        self._options = options
        self._random = Random(options.seed)
        folder = Path(tempfile.mkdtemp(prefix="tensorcache-faults-", dir="/dev/shm"))
        shutil.rmtree(folder)
        self._cluster = FaultCluster(
            folder, count=options.nodes, blocks=options.blocks, twice=self.ledger.twice
        )
        self._ring = RingChanges(self._cluster)
        self._seeds = itertools.count(options.seed % 1000 * 1000)
        self._ended = threading.Event()
        self._turns = {number: threading.Lock() for number in self._cluster.nodes}
        """Each held while its node has a request of the load."""
        self._begun = time.monotonic()

    def run(self) -> None:
        """Violations are in the ledger; exceptions are our own bugs."""
        self._say(f"seed {self._options.seed}, {self._options.nodes} nodes, {self._options.seconds:g} s")
        workers = [
            threading.Thread(target=self._work, args=(node,), name=f"work-{number}")
            for number, node in self._cluster.nodes.items()
        ]
        try:
            self._cluster.start()
            for worker in workers:
                worker.start()
            self._misfortunes()
            self._ended.set()
            for worker in workers:
                worker.join(60)
            self._checkpoint(everything=True)
            self._check_counters()
        finally:
            self._ended.set()
            self.ledger.violations += self._cluster.close()
        committed, ensured = self.ledger.totals()
        self._say(
            f"{self.ledger.reads} reads ({self.ledger.hits} found something, "
            f"{self.ledger.restored_blocks} blocks), {committed} blocks committed, {ensured} of them twice; "
            f"{len(self.ledger.violations)} violations"
        )

    def _misfortunes(self) -> None:
        deadline = self._begun + self._options.seconds
        for number, fault in enumerate(draw(self._options.seed, nodes=self._options.nodes), 1):
            if self._ended.wait(0.5) or time.monotonic() > deadline:
                return
            self._say(str(fault))
            if fault.kind is Kind.LOSE:
                self._checkpoint(lose=fault.node)
                continue
            self._suffer(fault)
            self._cluster.heal()
            if fault.kind in RING_CHANGES:
                self._ring.end(fault)
            if number % CHECK_EVERY == 0:
                self._checkpoint()

    def _suffer(self, fault: Fault) -> None:
        cluster, node, other = self._cluster, fault.node, fault.other
        match fault.kind:
            case Kind.MOVE | Kind.LEAVE | Kind.REMOVE | Kind.REPLICAS:
                self._ring.begin(fault)
                if fault.kill_after is not None:
                    self._ended.wait(fault.kill_after)
                    cluster.kill(fault.killed)
            case Kind.KILL:
                cluster.kill(node)
            case Kind.KILL_TWO:
                cluster.kill(node, other)
            case Kind.PAUSE:
                cluster.nodes[node].stop()
            case Kind.SLOW:
                cluster.links(node, SLOW)
            case Kind.STALL:
                cluster.links(node, STALLED)
            case Kind.CUT:
                cluster.link(node, other, CUT)
            case _:
                cluster.links(node, CUT)
        self._ended.wait(fault.seconds)

    def _checkpoint(self, *, lose: int = 0, everything: bool = False) -> None:
        with contextlib.ExitStack() as calm:
            for turn in self._turns.values():
                calm.enter_context(turn)
            self._check(lose=lose, everything=everything)

    def _check(self, *, lose: int, everything: bool) -> None:
        """Healed, all comes to rest; what had two copies is there, also once `lose` is gone."""
        self._cluster.heal()
        if trouble := self._cluster.wait_until_quiet(also=self._ring.trouble):
            self.ledger.violations.append(f"after {self._elapsed:.0f} s the cluster found no rest: {trouble}")
            return
        chains = self.ledger.chains()
        cluster = self._cluster
        last = f" ({cluster.was_restless})" if cluster.was_restless else ""
        self._say(f"at rest after {cluster.restless_s:.1f} s{last}; {len(chains)} chains")
        self.ledger.at_rest(self._cluster.held(chains))
        if lose:
            self._cluster.lose(lose)
            self.ledger.lost(self._cluster.held(chains))
        some = chains if everything else self._random.sample(chains, min(12, len(chains)))
        readers = [node for number, node in self._cluster.nodes.items() if number != lose]
        with ThreadPoolExecutor(len(readers)) as pool:
            list(pool.map(lambda node: self._read_all(node, some), readers))
        if lose:
            self._cluster.start(lose)

    def _read_all(self, node: NodeProcess, chains: list[ChainId]) -> None:
        for chain in chains:
            wanted, deadline = self.ledger.readable(chain), time.monotonic() + READABLE_S
            while True:
                read = node.read(chain, deadline_s=READ_DEADLINE_S)
                self.ledger.read(read)
                if read.restored >= wanted:
                    break
                if time.monotonic() > deadline:
                    self.ledger.unreadable(node.number, chain, read.restored)
                    break
                time.sleep(_AGAIN_S)  # a peer that was slow to answer is not asked for a moment

    def _check_counters(self) -> None:
        """Nothing may have gone for another reason than a fault, and no node made its own trouble."""
        for number, node in self._cluster.nodes.items():
            for name, value in node.counters().items():
                if value and name in _NEVER:
                    self.ledger.violations.append(f"node {number}: {name} is {value:g}")

    def _work(self, node: NodeProcess) -> None:
        """Write and read, again and again, for as long as the run lasts."""
        random = Random(f"{self._options.seed} {node.number}")
        while not self._ended.wait(random.uniform(*_PAUSE_S)):
            try:
                with self._turns[node.number]:
                    self._one_request(node, random)
            except NodeGoneError:
                self._ended.wait(0.1)  # somebody will bring it back

    def _one_request(self, node: NodeProcess, random: Random) -> None:
        chains = self.ledger.chains()
        if len(chains) < self._due and (len(chains) < _FIRST_CHAINS or random.random() < 0.5):
            blocks = random.randint(1, MAX_BLOCKS)
            chain = ChainId(random.randrange(len(FORMATS)), next(self._seeds), blocks)
            self.ledger.begun(chain, node.number)
            self.ledger.committed(chain, node.commit(chain))
            return
        if random.random() < 0.03:
            chain = ChainId(0, _UNWRITTEN + random.randrange(1000), MAX_BLOCKS)
        else:
            read = [chain for chain in chains if chain.seed % _READ_ONE_IN == 0]
            recent = random.random() < 0.7
            chain = random.choice((read[-10:] if recent else read) or chains)
        self.ledger.read(node.read(chain, deadline_s=READ_DEADLINE_S))

    @property
    def _due(self) -> float:
        """How many chains there should be by now: all of them at the end, so that writing never stops."""
        share = min(1.0, self._elapsed / self._options.seconds)
        return _FIRST_CHAINS + share * (self._options.chains - _FIRST_CHAINS)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _say(self, text: str) -> None:
        self._options.report(f"{self._elapsed:6.1f} s  {text}")


_NEVER = frozenset(
    {
        "cache_evicted_blocks_total", "cache_expired_blocks_total", "cache_corrupt_blocks_total",
        "cache_unreadable_blocks_total", "cache_full_refusals_total", "cache_lost_arenas_total",
        "cluster_failed_parts_total", "beyond_failed_fetches_total", "beyond_failed_offers_total",
    }
)  # fmt: skip
