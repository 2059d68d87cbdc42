"""The row of hot keys: how evenly nodes serve when one prompt takes most of the reads.

Eight nodes in one process, each with a host tier, a bulk server and hot keys of its own; eight readers that
are none of them, so that nothing is read where it lies, and that keep nothing of what they read. Everything
that is served travels over the real bulk channel (TCP on loopback); only the control service is left out:
tickets are handed over directly. Prompts are of two small blocks: who serves is measured, not how many bytes.

The same readers read without hot keys first. The threshold is scaled to what this machine served then: an
eighth of the hot prompt's reads.
"""

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from random import Random

from cachemgr import BlockHash, CacheSecrets
from cachemgr.cluster.background import Pace
from cachemgr.cluster.fetch.fetcher import Fetcher
from cachemgr.cluster.fetch.hot_keys import HotHints
from cachemgr.cluster.fetch.read_repair import ReadRepair
from cachemgr.cluster.moves.giver import Giver
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.host_contract import HostStore
from cachemgr.ring import NodeId
from scripts.bench.harness import Measurement, Reading
from scripts.bench.hot_cluster import PATIENT_S, BenchCluster, FixedRing, opened_cluster

ROW = "hot.max_over_mean"
_NODES = 8
_READERS = 8
_OTHERS = 400
"""Segments that share the rest of the reads."""
_HOT_SHARE = 0.8
_BLOCKS = 2
_SECONDS = 6.0
_WARM_UP_S = 4.0
_WINDOW_S = 2.0
_NEVER = 86_400.0


def measurements() -> list[Measurement]:
    """All measurements of hot keys."""
    return [Measurement((ROW,), _hot)]


def _hot() -> Iterator[Reading]:
    with tempfile.TemporaryDirectory() as folder:
        yield asyncio.run(_measured(Path(folder)))


async def _measured(folder: Path) -> Reading:
    secrets = CacheSecrets.generate(folder / "secrets")
    without = await _served(folder / "without", secrets, threshold=_NEVER)
    threshold = _HOT_SHARE * without.per_second / _NODES
    with_hot = await _served(folder / "with", secrets, threshold=threshold)
    detail = (
        f"{with_hot.ratio:.2f} with hot keys ({with_hot.counts}; {with_hot.early:.2f} in the first "
        f"{_WARM_UP_S:g} s), {without.ratio:.2f} without ({without.counts}); {_NODES} nodes and {_READERS} "
        f"readers in one process over the bulk channel, {with_hot.per_second:.0f} and "
        f"{without.per_second:.0f} reads/s, hot above {threshold:.0f}/s, k = {with_hot.extra}, "
        f"{with_hot.missed + without.missed} misses"
    )
    if without.ratio <= 5:
        raise RuntimeError(f"without hot keys max/mean must exceed 5: {detail}")
    return Reading(ROW, with_hot.ratio, detail)


class _Result:
    """What the nodes served in one run."""

    def __init__(self, early: list[int], served: list[int], *, extra: int, missed: int) -> None:
        self.early = _max_over_mean(early)
        self.ratio = _max_over_mean(served)
        self.counts = "/".join(map(str, served))
        self.per_second = sum(served) / _SECONDS
        self.extra = extra
        self.missed = missed


def _max_over_mean(served: list[int]) -> float:
    return max(served) / statistics.mean(served)


async def _served(folder: Path, secrets: CacheSecrets, *, threshold: float) -> _Result:
    """Read for a while, then count for a while."""
    folder.mkdir()
    settings = ClusterSettings(
        replicas=0, same_host=False, lookup_s=PATIENT_S, call_s=PATIENT_S,
        hot_reads_per_s=threshold, hot_window_s=_WINDOW_S,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(opened_cluster(folder, secrets, settings, nodes=_NODES))
        chains = cluster.prompts(1 + _OTHERS, blocks=_BLOCKS)
        readers = [await stack.enter_async_context(_reader(cluster, at)) for at in range(_READERS)]
        ends = time.monotonic() + _WARM_UP_S + _SECONDS
        reading = [asyncio.create_task(reader.read_until(ends, chains)) for reader in readers]
        await asyncio.sleep(_WARM_UP_S)
        early = [cluster.served[name] for name in cluster.names]
        await asyncio.gather(*reading)
        served = [cluster.served[name] - before for name, before in zip(cluster.names, early, strict=True)]
        extra = max(node.hot_keys.extra(chains[0][0]) for node in cluster.nodes.values())
        return _Result(early, served, extra=extra, missed=sum(reader.missed for reader in readers))


@contextlib.asynccontextmanager
async def _reader(cluster: BenchCluster, number: int) -> AsyncIterator["_Reader"]:
    """One that is on no ring."""
    rings = FixedRing(NodeId(f"reader-{number}"), cluster.ring)
    with ExitStack() as stack:
        _, store = cluster.store(stack, rings.node, blocks=4 * _BLOCKS)
        async with cluster.peers(rings) as peers:
            giver = Giver(Pace(1e9, clock=time.monotonic), call_s=PATIENT_S, clock=time.monotonic)
            repair = ReadRepair(peers, giver, clock=time.monotonic)
            fetcher = Fetcher(
                rings, peers, hints=HotHints(settings=cluster.settings, clock=time.monotonic), repair=repair,
                settings=cluster.settings, clock=time.monotonic, random=Random(number),
            )  # fmt: skip
            try:
                yield _Reader(store, fetcher, Random(1000 + number))
            finally:
                await fetcher.close()
                await repair.close()


class _Reader:
    """Reads one prompt after the other, and keeps none."""

    def __init__(self, store: HostStore, fetcher: Fetcher, random: Random) -> None:
        self._store = store
        self._fetcher = fetcher
        self._random = random
        self.missed = 0

    async def read_until(self, ends: float, chains: Sequence[list[BlockHash]]) -> None:
        """The first chain has its share of the reads, the others the rest."""
        while time.monotonic() < ends:
            hot = self._random.random() < _HOT_SHARE
            hashes = chains[0] if hot else chains[self._random.randrange(1, len(chains))]
            await self._fetcher.fetch(self._store, hashes, deadline=time.monotonic() + PATIENT_S)
            self.missed += bool(self._store.missing(hashes))
            self._store.drop(hashes)
