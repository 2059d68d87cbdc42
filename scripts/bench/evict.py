"""Rows of the eviction policy: what a block costs in time and memory, and what of a trace it keeps.

The trace lies outside the product. Which of the textbook's policies is best is seen anew at every capacity.
"""

import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cachemgr import BlockHash
from cachemgr.counts import Counts
from cachemgr.shard import address_of
from cachemgr.slot_table import SlotTable
from scripts.bench.goals import TRACE_CAPACITIES
from scripts.bench.harness import Measurement, PeerMissingError, Reading
from scripts.simulate.generate import KINDS, generate
from scripts.simulate.policies import OPTIMUM, OURS, TEXTBOOK
from scripts.simulate.replay import Measured, replay
from scripts.simulate.trace import Trace
from scripts.simulate.trace_file import read_trace, trace_of

_REQUESTS = 5_000
_CAPACITY = 20_000
_SEED = 1
_INDEXED = 1_000_000
_REMEMBERED = 2 * _INDEXED
_CHAIN = 32


def measurements(trace: Path, seen: list[Measured]) -> list[Measurement]:
    """All measurements of this file; `seen` gets what was replayed of the trace, for the plot."""
    rows = tuple(f"evict.conversation.{capacity}.vs_best" for capacity in TRACE_CAPACITIES)
    return [
        Measurement(("evict.touch_us",), _touch),
        Measurement(("evict.index_bytes_per_block",), _index_bytes),
        Measurement(rows, partial(_conversation, rows, trace, seen)),
    ]


def _touch() -> Iterator[Reading]:
    """The dearest of all made-up traffic: what a real trace costs depends on which one somebody has."""
    costs = {}
    for kind in KINDS:
        traffic = trace_of(kind, generate(kind, seed=_SEED, requests=_REQUESTS))
        capacity = min(_CAPACITY, traffic.distinct // 4)
        costs[kind] = replay(traffic, OURS, capacity=capacity).touch_us
    shown = ", ".join(f"{kind} {cost:.2f}" for kind, cost in costs.items())
    detail = f"the dearest of {shown}; mean of processor time, evictions and all, room for a quarter of it"
    yield Reading("evict.touch_us", max(costs.values()), detail)


def _index_bytes() -> Iterator[Reading]:
    """Index, order and history of a million blocks; numpy reports to tracemalloc, too."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        table = SlotTable(
            _INDEXED, ttl_s=1e9, erase=lambda slot: None, clock=time.monotonic, counts=Counts()
        )
        table.add_empty(range(_INDEXED))
        for start in range(0, _INDEXED + _REMEMBERED, _CHAIN):
            _make(table, [BlockHash(n.to_bytes(16, "little")) for n in range(start, start + _CHAIN)])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    gauges = table.gauges()
    if gauges["cache_resident_blocks"] != _INDEXED:
        raise RuntimeError(f"{gauges['cache_resident_blocks']:.0f} blocks are resident")
    ghosts = gauges.get("cache_ghosts", 0)
    detail = f"{_INDEXED} blocks and {ghosts:.0f} remembered, tracemalloc"
    yield Reading("evict.index_bytes_per_block", (after - before) / _INDEXED, detail)


def _make(table: SlotTable, names: list[BlockHash]) -> None:
    """A chain that nobody has seen, made here as any other."""
    for index in range(len(names)):
        slot = table.reserve(names, index)
        if slot is None:
            raise RuntimeError("no room for a block")
        table.publish(slot, address_of(names, index), names)


def _conversation(rows: tuple[str, ...], path: Path, seen: list[Measured]) -> Iterator[Reading]:
    trace = _read(path)
    for row, capacity in zip(rows, TRACE_CAPACITIES, strict=True):
        here = {policy: replay(trace, policy, capacity=capacity) for policy in (*TEXTBOOK, OURS, OPTIMUM)}
        seen += here.values()
        yield reading(row, here)


def reading(row: str, here: dict[str, Measured]) -> Reading:
    """Ours beside the best of the textbook that is there."""
    ours, optimum = here[OURS], here[OPTIMUM]
    best = max((here[policy] for policy in TEXTBOOK if policy in here), key=lambda one: one.hits)
    way = (ours.hits - best.hits) / max(1, optimum.hits - best.hits)
    detail = (
        f"{ours.block_hit_rate:.4f} against {best.block_hit_rate:.4f} of {best.policy}, "
        f"{way:.0%} of the way to the optimum's {optimum.block_hit_rate:.4f}, {ours.touch_us:.2f} µs a block"
    )
    return Reading(row, ours.hits / max(1, best.hits), detail)


def _read(path: Path) -> Trace:
    if not path.is_file():
        raise PeerMissingError(
            f"{path} is not there: take conversation_trace.jsonl from Mooncake's public repository "
            "(github.com/kvcache-ai/Mooncake, FAST25-release/traces), then --trace FILE, make: TRACE=FILE"
        )
    return read_trace(path)
