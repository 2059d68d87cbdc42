import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from engines import Engine, EngineSpec, LaneId, Logits
from scripts.bench import backend, engine, goals, harness, peer_worker, peers, report, subject
from scripts.bench.decoder import Heard
from scripts.bench.harness import Measurement, PeerMissingError, Reading, alternate, median_of
from scripts.bench.null_engine import NullEngine, Tokens

ISSUED = {
    "engine.prefill512.vs_llamacpp": ">= 2.5",
    "engine.decode1.vs_llamacpp": ">= 1.1",
    "engine.decode8.vs_llamacpp1": ">= 3",
    "engine.prefill2048.vs_openvino": ">= 1",
    "engine.decode1.vs_openvino": ">= 1.5",
    "engine.perplexity_vs_fp32": "<= 1.005",
    "backend.stream1.vs_engine": ">= 0.9",
    "backend.stream8.vs_engine": ">= 0.8",
    "engine.decode1.s8192_vs_s2048": "<= 1.15",
    "backend.step_overhead_us.lanes1": "<= 310",
    "backend.step_overhead_us.lanes8": "<= 380",
    "backend.step_overhead_us.lanes64": "<= 940",
    "cache.ttft1024.host_vs_compute": "<= 0.05",
    "cache.ttft2048.hit_vs_openvino_hit": "<= 0.6",
    "cache.restore.vs_memcpy": ">= 0.3",
    "tag.vs_memcpy": "<= 1.5",
    "cache.hash32k_ms": "<= 1.5",
    "cache.lookup1024_ms": "<= 1",
    "cache.reattach100k_ms": "<= 100",
    "cache.index_bytes_per_block": "<= 200",
    "backend.stall_chunks": "<= 2",
    "backend.swap_tpot_p99": "<= 2",
    "sampler.real32_ms": "<= 5",
    "sampler.flat32_ms": "<= 25",
    "ring.lookup16_ns": "<= 500",
    "ring.lookup1000_ns": "<= 1000",
    "ring.lookup16.vs_uhashring": "<= 0.5",
    "ring.build1000_s": "<= 1",
    "ring.snapshot1000_ms": "<= 50",
    "peer.shm.1mib.vs_memcpy": ">= 0.3",
    "peer.shm.4mib.vs_memcpy": ">= 0.35",
    "peer.tcp.1mib.vs_redis": ">= 1.2",
    "peer.tcp.4mib.vs_redis": ">= 1.2",
    "peer.tcp.1mib.vs_mooncake": ">= 2",
    "peer.tcp.1mib.vs_lmcache": ">= 1.3",
    "peer.p99_over_p50": "<= 3",
    "cluster.ttft1024.peer_vs_compute": "<= 0.1",
    "cluster.ttft1024.three_owners_vs_one": "<= 1.2",
    "cluster.index_lock_p99_us": "<= 500",
    "hot.max_over_mean": "<= 1.5",
    "move.failed_requests": "<= 0",
    "move.lost_blocks": "<= 0",
    "tiers.redis.1mib.get_vs_raw": ">= 0.9",
    "tiers.redis.4mib.get_vs_raw": ">= 0.9",
    "tiers.redis.1mib.put_vs_raw": ">= 0.9",
    "tiers.redis.4mib.put_vs_raw": ">= 0.9",
    "tiers.lmdb.1mib.get_vs_raw": ">= 0.9",
    "tiers.lmdb.1mib.put_vs_raw": ">= 0.8",
    "cache.ttft1024.redis_vs_compute": "<= 0.1",
    "cache.ttft1024.lmdb_vs_compute": "<= 0.1",
    "cache.slow_redis_ttft_vs_compute": "<= 1.1",
    "evict.touch_us": "<= 2",
    "evict.index_bytes_per_block": "<= 200",
    "evict.conversation.1000.vs_best": ">= 1",
    "evict.conversation.5859.vs_best": ">= 1",
    "evict.conversation.20000.vs_best": ">= 1",
    "evict.conversation.50000.vs_best": ">= 1",
    "fair.ttft_p99.flood_vs_share": "<= 2",
    **{f"gpu.smollm2.decode_ms.w{w}.b{b}": "none" for w in (256, 1024, 4096) for b in (1, 4, 8)},
    "gpu.smollm2.fused.prefill": "none",
    "gpu.smollm2.fused.decode": "none",
    "gpu.import.vs_pinned_copy": ">= 0.9",
    "gpu.restore.vs_pinned_copy": "none",
    "gpu.smollm2.ttft1024.hit_vs_miss": "none",
    "gpu.smollm2.decode1.vs_enqueue": "<= 1.05",
    "gpu.smollm2.decode8.vs_enqueue": "<= 1.05",
    "gpu.llama8b.ttft1024.hit_vs_miss": "none",
    "gpu.llama8b.decode1.vs_enqueue": "<= 1.05",
    "gpu.llama8b.decode8.vs_enqueue": "<= 1.05",
}
HASH = "cache.hash32k_ms"
LOOKUP = "cache.lookup1024_ms"


def test_goals_are_the_promised_ones() -> None:
    assert {goal.name: goal.text for goal in goals.GOALS.values()} == ISSUED


def test_every_row_belongs_to_one_room() -> None:
    named = [name for room in goals.ROOMS for name in goals.names_of(room)]
    assert sorted(named) == sorted(ISSUED)


def test_a_goal_is_met_at_its_limit_and_never_by_nan() -> None:
    at_most, at_least = goals.GOALS[HASH], goals.GOALS["engine.decode8.vs_llamacpp1"]
    assert at_most.met_by(1.5)
    assert not at_most.met_by(1.5001)
    assert at_least.met_by(3.0)
    assert not at_least.met_by(2.999)
    assert not at_most.met_by(float("nan"))


def test_sides_alternate_and_warmups_are_dropped() -> None:
    calls: list[str] = []
    values = iter([100.0, 1.0, 100.0, 1.0, 4.0, 2.0, 9.0, 3.0, 10.0, 1.0])

    def side(name: str) -> float:
        calls.append(name)
        return next(values)

    paired = alternate(lambda: side("a"), lambda: side("b"), rounds=3, warmups=2)
    assert "".join(calls) == "ab" * 5
    assert paired.a == (4.0, 9.0, 10.0)
    assert paired.b == (2.0, 3.0, 1.0)
    assert paired.ratio == 3.0  # of 2, 3, 10: of the pairs, not of the medians 9 and 2
    assert paired.medians == (9.0, 2.0)


def test_median_ignores_one_outlier() -> None:
    values = iter([50.0, 2.0, 900.0, 3.0])
    assert median_of(lambda: next(values), rounds=3) == 3.0


def test_a_failing_measurement_costs_only_its_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks() -> Iterator[Reading]:
        raise RuntimeError("no room\nsecond line")
        yield  # makes it a generator, as measurements are

    good = Measurement((LOOKUP,), lambda: [Reading(LOOKUP, 0.5, "calm")])
    shown: list[report.Row] = []
    rows = harness.run([Measurement((HASH,), breaks), good], shown.append)
    assert shown == rows
    assert (rows[0].name, rows[0].value, rows[0].met) == (HASH, None, False)
    assert rows[0].detail == "RuntimeError: no room"
    assert (rows[1].value, rows[1].met, rows[1].unit, rows[1].goal) == (0.5, True, "ms", "<= 1")
    assert rows[1].detail.startswith("calm")
    assert "no room" in capsys.readouterr().err


def test_values_taken_before_a_failure_are_kept() -> None:
    def breaks_late() -> Iterator[Reading]:
        yield Reading(LOOKUP, 7.0)
        raise PeerMissingError("no peers")

    rows = harness.run([Measurement((HASH, LOOKUP), breaks_late)], lambda row: None)
    assert [(row.name, row.value, row.met) for row in rows] == [(LOOKUP, 7.0, False), (HASH, None, None)]


def test_a_promised_row_without_value_is_a_failure() -> None:
    rows = harness.run([Measurement((HASH,), lambda: [])], lambda row: None)
    assert (rows[0].met, rows[0].detail) == (False, "the measurement gave no value")


def test_a_missing_peer_is_neither_met_nor_missed(tmp_path: Path) -> None:
    settings = peers.PeerSettings(python=tmp_path / "none", gguf=tmp_path / "x", threads=2, logs=tmp_path)

    def needs_peer() -> Iterator[Reading]:
        with peers.open_peer("llamacpp", settings):
            yield Reading(HASH, 1.0)

    rows = harness.run([Measurement((HASH,), needs_peer)], lambda row: None)
    assert (rows[0].value, rows[0].met) == (None, None)
    assert "make bench-peers" in rows[0].detail


def test_a_peer_environment_without_the_package_counts_as_missing(tmp_path: Path) -> None:
    settings = peers.PeerSettings(python=Path(sys.executable), gguf=tmp_path / "x", threads=2, logs=tmp_path)
    with pytest.raises(PeerMissingError, match=r"openvino-genai==.* is not installed"):
        peers.open_peer("openvino", settings)


PEER = """
import json, sys, time
for line in sys.stdin:
    question = json.loads(line)
    if question["op"] == "sleep":
        time.sleep(60)
    if question["op"] == "die":
        sys.exit("out of memory")
    if question["op"] == "refuse":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
    else:
        print(json.dumps({"seconds": len(question.get("tokens", [])) / 10}), flush=True)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[peers.Peer]:
    with peers.Peer("llamacpp", [sys.executable, "-c", PEER], log=tmp_path / "log") as started:
        yield started


def test_a_peer_answers_line_by_line(peer: peers.Peer) -> None:
    assert peer.seconds("prefill", [1, 2, 3], variant="plain") == 0.3
    assert peer.seconds("prefill", [1], variant="plain") == 0.1


def test_the_quicker_variant_is_chosen_by_its_best_try() -> None:
    class Uneven:
        kind = "llamacpp"
        seconds_of: ClassVar = {"flash": iter([9.0, 5.0, 2.0]), "plain": iter([0.1, 3.0, 3.0])}

        def seconds(self, op: str, tokens: list[int], *, variant: str) -> float:
            return next(self.seconds_of[variant])

    chosen = peers.quicker_variant(Uneven(), "prefill", lambda: [1])
    assert chosen == "flash"  # the 0.1 of the other was its warm-up


def test_a_peer_error_is_told_and_the_peer_goes_on(peer: peers.Peer) -> None:
    with pytest.raises(peers.PeerError, match="llamacpp refuse: ValueError: no"):
        peer.ask("refuse")
    assert peer.ask("hello") == {"seconds": 0.0}


def test_a_silent_peer_is_given_up_at_the_deadline(peer: peers.Peer) -> None:
    started = time.monotonic()
    with pytest.raises(peers.PeerError, match="no answer in time"):
        peer.ask("sleep", limit_s=0.2)
    assert time.monotonic() - started < 10


def test_the_last_words_of_a_dead_peer_are_told(peer: peers.Peer) -> None:
    with pytest.raises(peers.PeerError, match="llamacpp ended: out of memory"):
        peer.ask("die")


class _Clockwork:
    def prefill(self, tokens: list[int], variant: str) -> float:
        return len(tokens) * (2.0 if variant == "plain" else 1.0)

    def decode(self, tokens: list[int], variant: str, count: int) -> float:
        if not tokens:
            raise KeyError("no slot")
        return count * 0.5


def test_the_worker_answers_each_line_and_survives_errors() -> None:
    questions = [
        {"op": "hello"},
        {"op": "prefill", "tokens": [1, 2], "variant": "plain"},
        {"op": "decode", "tokens": [1], "variant": "plain", "count": 8},
        {"op": "decode", "tokens": [], "variant": "plain", "count": 8},
        {"op": "dance"},
    ]
    lines = b"".join(json.dumps(question).encode() + b"\n" for question in questions)
    out = io.BytesIO()
    peer_worker.serve(_Clockwork(), io.BytesIO(lines), out)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert answers == [
        {"ready": True},
        {"seconds": 4.0},
        {"seconds": 4.0},
        {"error": "KeyError: 'no slot'"},
        {"error": "unknown op 'dance'"},
    ]


ROWS = [
    report.Row(name=HASH, value=0.851, unit="ms", goal="<= 1.5", met=True, detail="median of 9"),
    report.Row(
        name="engine.decode8.vs_llamacpp1", value=None, unit="ratio", goal=">= 3", met=None, detail="no peers"
    ),
]


def test_json_is_a_list_of_rows_with_exactly_these_keys(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "bench.json"
    report.write_json(ROWS, path)
    plain = json.loads(path.read_text())
    assert [sorted(row) for row in plain] == [["detail", "goal", "met", "name", "unit", "value"]] * 2
    assert plain[0]["value"] == 0.851
    assert plain[1]["met"] is None
    assert report.read_json(path) == ROWS
    assert [entry.name for entry in path.parent.iterdir()] == ["bench.json"]


def test_json_has_no_infinity(tmp_path: Path) -> None:
    report.write_json([report.Row("x", float("inf"), "ms", "<= 1", True, "d")], tmp_path / "b.json")
    assert report.read_json(tmp_path / "b.json") == [
        report.Row("x", None, "ms", "<= 1", False, "value inf; d")
    ]


def test_the_table_is_aligned_and_shows_each_verdict() -> None:
    missed = report.Row(name=LOOKUP, value=12.0, unit="ms", goal="<= 1", met=False, detail="")
    lines = report.table([*ROWS, missed]).splitlines()
    at = lines[0].index("goal")
    assert [line[at : at + 2] for line in lines[1:]] == ["<=", ">=", "<="]
    met = lines[0].index("met")
    assert [line[met : met + 3].strip() for line in lines[1:]] == ["yes", "-", "NO"]
    assert report.summary([*ROWS, missed]) == "1 met, 1 missed, 1 not compared"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.05123, "0.05123"), (1.00361, "1.004"), (1234.5, "1234"), (0, "0"), (45.678, "45.68")],
)
def test_numbers_keep_four_digits(value: float | None, text: str) -> None:
    assert report.number_text(value) == text


def test_the_machine_line_names_cpu_cores_and_date() -> None:
    line = report.machine_line(0.0)
    assert "cores" in line
    assert "19" in line
    assert "\n" not in line


class _CountingEngine:
    """Its logits are a function of the sum of the tokens a lane holds, so a wrong context changes them."""

    def __init__(self, *, lanes: int, block: int) -> None:
        spec = NullEngine(lanes=lanes).spec
        self.spec: EngineSpec = dataclasses.replace(spec, block_tokens=block, max_prefill_tokens=8)
        self._held = np.zeros((lanes, 64), np.int64)

    def prefill(self, lane: LaneId, tokens: Tokens, start: int) -> Logits:
        assert len(tokens) <= 8
        self._held[lane, start : start + len(tokens)] = tokens
        return Logits(self._of(lane, start + len(tokens))[None])

    def decode(self, lanes: list[LaneId], tokens: Tokens, positions: Tokens) -> Logits:
        for lane, token, position in zip(lanes, tokens, positions, strict=True):
            self._held[lane, position] = token
        rows = [self._of(lane, int(at) + 1) for lane, at in zip(lanes, positions, strict=True)]
        return Logits(np.stack(rows))

    def export_blocks(self, lane: LaneId, blocks: range, out: list[npt.NDArray[np.uint8]]) -> None:
        size = self.spec.block_tokens
        out[0][: size * 8] = self._held[lane, blocks.start * size : blocks.stop * size].view(np.uint8)

    def import_blocks(self, lane: LaneId, blocks: range, payloads: list[npt.NDArray[np.uint8]]) -> None:
        size = self.spec.block_tokens
        self._held[lane, blocks.start * size : blocks.stop * size] = payloads[0][: size * 8].view(np.int64)

    def prewarm(self) -> Iterator[str]:
        return iter(())

    def adopt_kv(self, previous: Engine) -> None: ...

    def close(self) -> None: ...

    def _of(self, lane: int, length: int) -> npt.NDArray[np.float32]:
        total = int(self._held[lane, :length].sum()) + length
        return np.sin(np.arange(32) * total).astype(np.float32)


def test_losses_of_parts_in_lanes_are_those_of_one_long_run() -> None:
    tokens = np.random.default_rng(3).integers(0, 32, 32)
    alone = engine.losses(_CountingEngine(lanes=1, block=4), tokens)
    assert alone.shape == (31,)
    assert np.array_equal(engine.losses(_CountingEngine(lanes=4, block=4), tokens), alone)
    logits = np.sin(np.arange(32) * (int(tokens[0]) + 1))
    assert alone[0] == pytest.approx(np.log(np.exp(logits).sum()) - logits[tokens[1]], rel=1e-5)


def test_the_longest_silence_counts_from_the_last_arrival_before() -> None:
    heard = Heard(0.0, arrivals=[1.0, 2.0, 7.0, 8.5, 30.0])
    assert backend.longest_silence(heard, 3.0, 9.0) == 5.0
    assert backend.longest_silence(heard, 7.5, 9.0) == 1.5


def test_the_text_is_prose() -> None:
    text = subject.english_text()
    assert len(text) > 100_000
    assert "::=" not in text
    assert all(line.endswith(".") for line in text.splitlines())


def test_step_overhead_counts_only_steps_of_all_lanes() -> None:
    null = NullEngine(lanes=2)
    both, one = [LaneId(0), LaneId(1)], [LaneId(1)]
    tokens = np.zeros(2, np.int64)
    for lanes in (both, both, one, both, both):
        null.decode(lanes, tokens[: len(lanes)], tokens[: len(lanes)])
    assert len(null.gaps) == 2
