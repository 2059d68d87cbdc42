"""The rows of the bench: what each measures, in which unit, and which value is good enough."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Room = Literal["engine", "backend", "cache", "cluster", "tiers", "access", "gpu"]
ROOMS: tuple[Room, ...] = ("engine", "backend", "cache", "cluster", "tiers", "access", "gpu")
EVERYWHERE: tuple[Room, ...] = ("engine", "backend", "cache", "cluster", "tiers", "access")
"""The rooms that need no GPU."""

_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Goal:
    """One row: `value` meets the goal if `value <sense> limit`; without a limit it is only to be known."""

    name: str
    room: Room
    unit: str
    sense: Literal["<=", ">="]
    limit: float | None

    def met_by(self, value: float) -> bool | None:
        """NaN meets nothing; None where there is no limit."""
        if self.limit is None:
            return None
        return _COMPARE[self.sense](value, self.limit)

    @property
    def text(self) -> str:
        """`>= 2.5`, as bench.json has it."""
        if self.limit is None:
            return "none"
        return f"{self.sense} {self.limit:g}"


STEP_LANES = (1, 8, 64)
STEP_BASE_US, STEP_LANE_US = 300, 10
GPU_MODELS: tuple[Literal["smollm2", "llama8b"], ...] = ("smollm2", "llama8b")
GPU_WINDOWS = (256, 1024, 4096)
GPU_ROWS = (1, 4, 8)
REDIS_MIBS = (1, 4)
TRACE_CAPACITIES = (1_000, 5_859, 20_000, 50_000)
"""Blocks of 512 tokens: of the trace's own, not the product's."""

_ROWS = (
    Goal("engine.prefill512.vs_llamacpp", "engine", "ratio", ">=", 2.5),
    Goal("engine.decode1.vs_llamacpp", "engine", "ratio", ">=", 1.1),
    Goal("engine.decode8.vs_llamacpp1", "engine", "ratio", ">=", 3.0),
    Goal("engine.prefill2048.vs_openvino", "engine", "ratio", ">=", 1.0),
    Goal("engine.decode1.vs_openvino", "engine", "ratio", ">=", 1.5),
    Goal("engine.perplexity_vs_fp32", "engine", "ratio", "<=", 1.005),
    Goal("engine.decode1.s8192_vs_s2048", "engine", "ratio", "<=", 1.15),
    Goal("backend.stream1.vs_engine", "backend", "ratio", ">=", 0.9),
    Goal("backend.stream8.vs_engine", "backend", "ratio", ">=", 0.8),
    *(
        Goal(f"backend.step_overhead_us.lanes{n}", "backend", "µs", "<=", STEP_BASE_US + STEP_LANE_US * n)
        for n in STEP_LANES
    ),
    Goal("backend.stall_chunks", "backend", "chunks", "<=", 2.0),
    Goal("backend.swap_tpot_p99", "backend", "ratio", "<=", 2.0),
    Goal("sampler.real32_ms", "backend", "ms", "<=", 5.0),
    Goal("sampler.flat32_ms", "backend", "ms", "<=", 25.0),
    Goal("cache.ttft1024.host_vs_compute", "cache", "ratio", "<=", 0.05),
    Goal("cache.ttft2048.hit_vs_openvino_hit", "cache", "ratio", "<=", 0.6),
    Goal("cache.restore.vs_memcpy", "cache", "ratio", ">=", 0.3),
    Goal("cache.hash32k_ms", "cache", "ms", "<=", 1.5),
    Goal("cache.lookup1024_ms", "cache", "ms", "<=", 1.0),
    Goal("cache.reattach100k_ms", "cache", "ms", "<=", 100.0),
    Goal("cache.index_bytes_per_block", "cache", "bytes", "<=", 200.0),
    Goal("ring.lookup16_ns", "cluster", "ns", "<=", 500.0),
    Goal("ring.lookup1000_ns", "cluster", "ns", "<=", 1000.0),
    Goal("ring.lookup16.vs_uhashring", "cluster", "ratio", "<=", 0.5),
    Goal("ring.build1000_s", "cluster", "s", "<=", 1.0),
    Goal("ring.snapshot1000_ms", "cluster", "ms", "<=", 50.0),
    Goal("peer.shm.1mib.vs_memcpy", "cluster", "ratio", ">=", 0.3),
    Goal("peer.shm.4mib.vs_memcpy", "cluster", "ratio", ">=", 0.35),
    Goal("peer.tcp.1mib.vs_redis", "cluster", "ratio", ">=", 1.2),
    Goal("peer.tcp.4mib.vs_redis", "cluster", "ratio", ">=", 1.2),
    Goal("peer.tcp.1mib.vs_mooncake", "cluster", "ratio", ">=", 2.0),
    Goal("peer.tcp.1mib.vs_lmcache", "cluster", "ratio", ">=", 1.3),
    Goal("peer.p99_over_p50", "cluster", "ratio", "<=", 3.0),
    Goal("cluster.ttft1024.peer_vs_compute", "cluster", "ratio", "<=", 0.1),
    Goal("cluster.ttft1024.three_owners_vs_one", "cluster", "ratio", "<=", 1.2),
    Goal("cluster.index_lock_p99_us", "cluster", "µs", "<=", 500.0),
    Goal("hot.max_over_mean", "cluster", "ratio", "<=", 1.5),
    Goal("move.failed_requests", "cluster", "requests", "<=", 0.0),
    Goal("move.lost_blocks", "cluster", "blocks", "<=", 0.0),
    *(Goal(f"tiers.redis.{mib}mib.get_vs_raw", "tiers", "ratio", ">=", 0.9) for mib in REDIS_MIBS),
    *(Goal(f"tiers.redis.{mib}mib.put_vs_raw", "tiers", "ratio", ">=", 0.9) for mib in REDIS_MIBS),
    Goal("tiers.lmdb.1mib.get_vs_raw", "tiers", "ratio", ">=", 0.9),
    Goal("tiers.lmdb.1mib.put_vs_raw", "tiers", "ratio", ">=", 0.8),
    Goal("cache.ttft1024.redis_vs_compute", "tiers", "ratio", "<=", 0.1),
    Goal("cache.ttft1024.lmdb_vs_compute", "tiers", "ratio", "<=", 0.1),
    Goal("cache.slow_redis_ttft_vs_compute", "tiers", "ratio", "<=", 1.1),
    Goal("evict.touch_us", "tiers", "µs", "<=", 2.0),
    Goal("evict.index_bytes_per_block", "tiers", "bytes", "<=", 200.0),
    *(Goal(f"evict.conversation.{n}.vs_best", "tiers", "ratio", ">=", 1.0) for n in TRACE_CAPACITIES),
    Goal("tag.vs_memcpy", "access", "ratio", "<=", 1.5),
    Goal("fair.ttft_p99.flood_vs_share", "access", "ratio", "<=", 2.0),
    *(
        Goal(f"gpu.smollm2.decode_ms.w{window}.b{rows}", "gpu", "ms", "<=", None)
        for window in GPU_WINDOWS
        for rows in GPU_ROWS
    ),
    Goal("gpu.smollm2.fused.prefill", "gpu", "ratio", ">=", None),
    Goal("gpu.smollm2.fused.decode", "gpu", "ratio", ">=", None),
    Goal("gpu.import.vs_pinned_copy", "gpu", "ratio", ">=", 0.9),
    Goal("gpu.restore.vs_pinned_copy", "gpu", "ratio", ">=", None),
    *(
        goal
        for model in GPU_MODELS
        for goal in (
            Goal(f"gpu.{model}.ttft1024.hit_vs_miss", "gpu", "ratio", "<=", None),
            Goal(f"gpu.{model}.decode1.vs_enqueue", "gpu", "ratio", "<=", 1.05),
            Goal(f"gpu.{model}.decode8.vs_enqueue", "gpu", "ratio", "<=", 1.05),
        )
    ),
)

GOALS: dict[str, Goal] = {goal.name: goal for goal in _ROWS}


def names_of(room: Room) -> tuple[str, ...]:
    """The rows of one room, in the order of the table."""
    return tuple(goal.name for goal in _ROWS if goal.room == room)
