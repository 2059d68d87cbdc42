"""Rows of the eviction policy: what a block costs in time and memory, and what of a trace it keeps.

The trace lies outside the product. Which of the textbook's policies is best is seen anew at every capacity.
"""

import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

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
_MADE = 500_000
_CHAIN = 32
_AT_ONCE = 10_000


def measurements(trace: Path, seen: list[Measured]) -> list[Measurement]:
    """All measurements of this file; `seen` gets what was replayed of the trace, for the plot."""
    rows = tuple(f"evict.conversation.{capacity}.vs_best" for capacity in TRACE_CAPACITIES)
    return [
        Measurement(("evict.touch_us",), partial(_touch, trace)),
        Measurement(("evict.index_bytes_per_block",), _index_bytes),
        Measurement(rows, partial(_conversation, rows, trace, seen)),
    ]


def _touch(path: Path) -> Iterator[Reading]:
    """The dearest of all made-up traffic and of the trace, where that is there."""
    traffic = [trace_of(kind, generate(kind, seed=_SEED, requests=_REQUESTS)) for kind in KINDS]
    if path.is_file():
        traffic.append(read_trace(path))
    costs = {
        one.title: replay(one, OURS, capacity=min(_CAPACITY, one.distinct // 4)).touch_us for one in traffic
    }
    shown = ", ".join(f"{title} {cost:.2f}" for title, cost in costs.items())
    detail = f"the dearest of {shown}; mean of processor time, evictions and all, room for a quarter of it"
    yield Reading("evict.touch_us", max(costs.values()), detail)


def _index_bytes() -> Iterator[Reading]:
    """Index, order and history of a full cache: numpy tells tracemalloc, too.

    A million blocks are found at the start, and then half of them replaced: a cache that has run for a while
    may take more memory than one that was just filled.
    """
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        table = SlotTable(
            _INDEXED, ttl_s=1e9, erase=lambda slot: None, clock=time.monotonic, counts=Counts()
        )
        for start in range(0, _INDEXED, _AT_ONCE):
            slots = np.arange(start, start + _AT_ONCE, dtype=np.int32)
            table.add_resident(_names(start, _AT_ONCE), slots, np.zeros(_AT_ONCE, np.uint32))
        for start in range(_INDEXED, _INDEXED + _MADE, _CHAIN):
            _make(table, _names(start, _CHAIN))
        del slots
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    gauges = table.gauges()
    if gauges["cache_resident_blocks"] != _INDEXED:
        raise RuntimeError(f"{gauges['cache_resident_blocks']:.0f} blocks are resident")
    detail = f"{_INDEXED} blocks, {gauges['cache_ghosts']:.0f} remembered, after {_MADE} others, tracemalloc"
    yield Reading("evict.index_bytes_per_block", (after - before) / _INDEXED, detail)


def _names(start: int, count: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "little")) for number in range(start, start + count)]


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
