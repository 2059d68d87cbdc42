"""The room tiers of the bench: its real servers and its proxy, that both sides do the same, and its plots."""

import importlib
import socket
import time
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.shard import ALIGN
from scripts.bench import command, evict, goals, harness, tier_lmdb, tier_redis, tiers
from scripts.bench.redis_server import redis_server
from scripts.bench.slow_proxy import Frames, slowed
from scripts.bench.subject import BenchSettings, Subject
from scripts.bench.tier_store import Copies, blocks_here, windows
from scripts.simulate.generate import generate
from scripts.simulate.replay import Measured
from scripts.simulate.trace_file import write_trace

SMALL, ALMOST = b"$3\r\n$9\r\r\n", b"$65535\r\n" + b"\n" * 65535 + b"\r\n"
LARGE = b"$65536\r\n" + b"\r\n$70000\r\n".ljust(65536, b"x") + b"\r\n"
ANSWERS = (b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*2\r\n", b"-ERR $70000\r\n", SMALL, ALMOST, LARGE)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return Subject(BenchSettings(folder=tmp_path, peers_python=tmp_path / "none"))


def client(port: int) -> Any:
    return closing(importlib.import_module("redis").Redis(host="127.0.0.1", port=port))


def refuses(port: int) -> bool:
    with socket.socket() as door:
        return door.connect_ex(("127.0.0.1", port)) != 0


def test_every_row_of_the_room_is_measured(subject: Subject, tmp_path: Path) -> None:
    measured = [row for one in tiers.Tiers(subject, trace=tmp_path).measurements() for row in one.rows]
    assert sorted(measured) == sorted(goals.names_of("tiers"))


@given(
    answers=st.lists(st.sampled_from(ANSWERS), max_size=6),
    cuts=st.lists(st.integers(0, 400_000), max_size=6),
)
def test_only_large_values_are_waited_for_wherever_the_stream_is_cut(
    answers: list[bytes], cuts: list[int]
) -> None:
    stream, frames = b"".join(answers), Frames()
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    passed, waits = b"", []
    for start, end in pairwise(places):
        for part, value_begins in frames.split(stream[start:end]):
            passed += part
            if value_begins:
                waits.append(len(passed))
    assert passed == stream
    assert waits == [
        len(b"".join(answers[:at])) + len(b"$65536\r\n") for at, one in enumerate(answers) if one is LARGE
    ]


def test_a_server_is_there_and_then_it_is_gone_also_when_somebody_stops_the_bench() -> None:
    seen = []
    for error in (KeyboardInterrupt, RuntimeError):
        with suppress(error), redis_server() as port, client(port) as redis:
            assert redis.ping()
            seen.append(port)
            raise error
    assert all(refuses(port) for port in seen)


def test_the_proxy_holds_up_each_value_and_nothing_else_and_changes_none() -> None:
    values = {str(number): bytes([number]) * (70_000 + number) for number in range(5)}
    with redis_server() as port, slowed(port, value_s=0.03) as slow_port, client(slow_port) as redis:
        redis.mset(values)
        started = time.monotonic()
        assert redis.mget(list(values)) == list(values.values())
        assert time.monotonic() - started >= 5 * 0.03
        assert redis.exists(*values) == 5
    assert refuses(slow_port)


def test_the_proxy_outlives_who_goes_away_in_the_middle_of_a_value() -> None:
    with redis_server() as port, slowed(port, value_s=0.05) as slow_port:
        with client(slow_port) as redis:
            redis.set("name", bytes(1 << 20))
        with socket.create_connection(("127.0.0.1", slow_port)) as door:
            door.sendall(b"*2\r\n$3\r\nGET\r\n$4\r\nname\r\n")
            assert door.recv(1) == b"$"
        with client(slow_port) as redis:
            assert redis.get("name") == bytes(1 << 20)


def test_what_a_plain_client_got_is_copied_to_aligned_memory_and_checked(tmp_path: Path) -> None:
    with blocks_here(tmp_path, mib=1, count=2) as (blocks, _):
        copies = Copies(blocks)
        shards = [shard for shard in blocks.store.hold(blocks.names) if shard is not None]
        for index, shard in enumerate(shards):
            copies.take(index, shard.header, shard.payload, blocks.addresses[index])
            assert copies.slots[index].ctypes.data % ALIGN == 0
            assert copies.slots[index].tobytes() == shard.payload.tobytes()
        wrong = bytearray(shards[0].payload)
        wrong[-1] ^= 1
        with pytest.raises(RuntimeError, match="did not pass"):
            copies.take(0, shards[0].header, memoryview(wrong), blocks.addresses[0])
        with pytest.raises(RuntimeError, match="for block"):
            copies.take(1, shards[0].header, shards[0].payload, blocks.addresses[1])
        blocks.store.let_go(shards)


def test_windows_cover_all_blocks_and_hold_at_least_one(tmp_path: Path) -> None:
    addresses: list[Any] = [None] * 5
    assert list(windows(addresses, 100, 250)) == [range(2), range(2, 4), range(4, 5)]
    assert list(windows(addresses, 100, 50)) == [range(at, at + 1) for at in range(5)]


@pytest.mark.parametrize("room", [tier_redis, tier_lmdb])
def test_both_sides_move_all_blocks_and_leave_nothing(
    room: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_ROUND_NBYTES", 4 << 20), ("_BLOCKS", 4)):
        monkeypatch.setattr(room, name, value, raising=False)
    for name in ("_ROUNDS", "_READ_ROUNDS", "_WRITE_ROUNDS"):
        monkeypatch.setattr(room, name, 1, raising=False)
    before = set(Path("/dev/shm").glob("tensorcache_bench_reader-*"))
    rows = harness.run(room.measurements(tmp_path), lambda row: None)
    assert rows
    assert [row.detail for row in rows if not row.value] == []
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/dev/shm").glob("tensorcache_bench_reader-*")) <= before


def test_a_trace_that_is_not_there_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(["--only", "tiers", "--trace", str(tmp_path / "none.jsonl"), "--folder", str(tmp_path)])
    assert refused.value.code == 2
    assert f"--trace: no such file: {tmp_path}/none.jsonl" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_the_trace_its_rows_are_not_compared_and_say_how_to_get_it(tmp_path: Path) -> None:
    [*_, conversation] = evict.measurements(tmp_path / "none.jsonl", [])
    rows = harness.run([conversation], lambda row: None)
    assert len(rows) == len(goals.TRACE_CAPACITIES)
    assert [row.name for row in rows] == list(conversation.rows)
    assert {(row.value, row.met) for row in rows} == {(None, None)}
    assert all("Mooncake" in row.detail and "--trace" in row.detail for row in rows)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, generate("chat", seed=3, requests=300))
    return path


def test_a_trace_is_compared_with_the_best_at_each_capacity_and_both_plots_are_drawn(
    trace: Path, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    room = tiers.Tiers(subject, trace=trace)
    assert room.draw() == []
    [*_, conversation] = room.measurements()
    rows = harness.run([conversation], lambda row: None)
    assert all(row.value for row in rows)
    subject.ttft_s.update({"redis": 0.02, "compute": 0.5})
    assert room.draw() == [tiers.TTFT_PLOT, tiers.HIT_RATE_PLOT]
    assert all(b"<svg" in path.read_bytes() for path in room.draw())


def test_the_ratio_is_ours_over_the_best_of_the_textbook() -> None:
    hits = {"lru": 100, "lfu": 150, "ours": 165, "optimum": 250}
    here = {name: Measured(name, 1000, 1000, count, 1.5) for name, count in hits.items()}
    reading = evict.reading("evict.conversation.1000.vs_best", here)
    assert reading.value == pytest.approx(1.1)
    assert "0.1650 against 0.1500 of lfu, 15% of the way" in reading.detail
