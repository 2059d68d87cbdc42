"""`tensorcache simulate` as a user runs it."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from scripts import console
from scripts.cli import main
from scripts.simulate.policies import CONTESTANTS, INFINITE
from scripts.simulate.trace_file import MOST_BLOCKS

LINES = [json.dumps({"timestamp": n, "hash_ids": [n % 3, 10 + n % 3]}) for n in range(30)]


class Said(NamedTuple):
    code: int
    out: str
    err: str


Ask = Callable[..., Said]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def run(*words: str) -> Said:
        capsys.readouterr()
        try:
            code = main(["simulate", *words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(LINES))
    return path


def test_one_json_object_a_policy_and_line(ask: Ask, trace: Path) -> None:
    said = ask("--trace", str(trace), "--capacity", "2,6", "--json")
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert (said.code, said.err) == (0, "")
    wanted = [name for name in CONTESTANTS if name != INFINITE]
    assert [(row["capacity"], row["policy"]) for row in rows] == [
        (c, name) for c in (2, 6) for name in wanted
    ]
    assert {"ours", "optimum", "lru-2", "s3-fifo", "w-tinylfu"} <= set(wanted)
    for row in rows:
        assert list(row) == ["policy", "capacity", "blocks", "block_hit_rate", "touch_us"]
        assert row["blocks"] == 60
        assert 0 <= row["block_hit_rate"] <= 0.9
        assert row["touch_us"] > 0
    assert {row["block_hit_rate"] for row in rows if row["capacity"] == 6} == {0.9}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("ours", ["ours"]),
        ("LRU2,s3fifo,W_TinyLFU", ["lru-2", "s3-fifo", "w-tinylfu"]),
        (" optimum , lru,optimum", ["optimum", "lru"]),
        ("infinite", ["infinite"]),
    ],
)
def test_policies_by_name(ask: Ask, trace: Path, names: str, found: list[str]) -> None:
    said = ask("--trace", str(trace), "--capacity", "4", "--policy", names, "--json")
    assert [json.loads(line)["policy"] for line in said.out.splitlines()] == found


def test_help_names_every_policy(ask: Ask) -> None:
    assert ", ".join(CONTESTANTS) in " ".join(ask("--help").out.split())


def test_a_table_a_capacity(ask: Ask, trace: Path) -> None:
    said = ask("--trace", str(trace), "--capacity", "2,4")
    assert said.code == 0
    assert "mine.jsonl: 30 requests, 60 blocks, 6 distinct" in said.out
    first, second = said.out.split("4 blocks\n")
    assert "2 blocks" in first
    cells = {row.split("│")[1].strip(): [cell.strip() for cell in row.split("│")[2:-1]] for row in
             second.splitlines() if row.startswith("│")}  # fmt: skip
    assert {name.removesuffix(" (best textbook)") for name in cells} >= set(CONTESTANTS)
    best = next(name for name in cells if name.endswith("(best textbook)"))
    assert cells[best][1] == "0%"
    assert cells["optimum"][1] == "100%"
    assert cells["ours"][1].endswith("%")
    assert cells["infinite"][0] == "0.9000"
    assert "block hit rate by capacity" in second
    assert "p optimum" in second


def test_one_capacity_needs_no_plot(ask: Ask, trace: Path) -> None:
    assert "by capacity" not in ask("--trace", str(trace), "--capacity", "2").out


def test_ids_that_are_not_chained_are_told(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [3, 2]}\n')
    said = ask("--trace", str(path), "--capacity", "2", "--policy", "lru")
    assert "its ids are not chained: 1 distinct blocks" in " ".join(said.out.split())


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_in_a_file(ask: Ask, trace: Path, suffix: str) -> None:
    path = trace.parent / "new" / f"rates{suffix}"
    said = ask("--trace", str(trace), "--capacity", "2,4", "--plot", str(path))
    assert f"plot written to {path}" in said.out
    assert path.stat().st_size > 5000
    said = ask("--trace", str(trace), "--capacity", "2,4", "--plot", str(path), "--json")
    assert all(line.startswith("{") for line in said.out.splitlines())


def test_made_up_traffic_is_replayed_as_if_read(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    made = ("--generate", "chat", "--seed", "5", "--requests", "50")
    options = ("--capacity", "100", "--policy", "lru,optimum", "--json")
    assert "50 requests written" in ask(*made, "--out", str(path)).out
    rates = [
        [json.loads(line)["block_hit_rate"] for line in said.out.splitlines()]
        for said in (ask(*made, *options), ask("--trace", str(path), *options))
    ]
    assert rates[0] == rates[1]
    both = ask(*made, *options, "--out", str(path))
    assert [json.loads(line)["block_hit_rate"] for line in both.out.splitlines()] == rates[0]
    shown = ask(*made, *options[:-1], "--out", str(path)).out
    assert shown.startswith(f"50 requests written to {path}\n"), "with tables it is said, too"


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        ((), 2, "one of the arguments --trace --generate is required"),
        (("--trace", "TRACE"), 2, "--capacity N[,N…]"),
        (("--trace", "TRACE", "--capacity", "0"), 2, "expected at least 1, got 0"),
        (("--trace", "TRACE", "--capacity", "10,x"), 2, "expected a whole number, got 'x'"),
        (("--trace", "TRACE", "--capacity", ""), 2, "expected a whole number"),
        (
            ("--trace", "TRACE", "--capacity", "1", "--policy", "lru,clock"),
            2,
            "--policy: 'clock' is none of fifo,",
        ),
        (("--trace", "TRACE", "--capacity", "1", "--policy", ""), 2, "--policy: '' is none of fifo,"),
        (("--trace", "TRACE", "--capacity", "1", "--plot", "x.pdf"), 2, "ends in .png or .svg, got x.pdf"),
        (("--trace", "TRACE", "--capacity", "1", "--seed", "1"), 2, "--seed goes with --generate"),
        (("--trace", "TRACE", "--capacity", "1", "--out", "x"), 2, "--out goes with --generate"),
        (("--trace", "/not/there.jsonl", "--capacity", "1"), 1, "/not/there.jsonl: No such file"),
        (("--trace", "/", "--capacity", "1"), 1, "/: Is a directory"),
        (("--generate", "video", "--capacity", "1"), 2, "--generate: 'video' is none of zipf, chat, agent"),
        (("--generate", "zipf"), 2, "--capacity N[,N…]"),
        (("--generate", "zipf", "--requests", "1000001", "--capacity", "1"), 2, "must be at most 1000000"),
        (("--generate", "zipf", "--out", "x", "--json"), 2, "name the sizes"),
        (("--generate", "zipf", "--trace", "TRACE"), 2, "not allowed with"),
        (("--generate", "zipf", "--requests", "1", "--out", "/not/there/x"), 1, "/not/there/x: No such file"),
    ],
)
def test_wrong_words(ask: Ask, trace: Path, words: tuple[str, ...], code: int, problem: str) -> None:
    said = ask(*(str(trace) if word == "TRACE" else word for word in words))
    assert said.code == code
    assert problem in said.err
    assert "Traceback" not in said.err


def test_a_bad_line_is_one_line(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"hash_ids": [1]}\n{"hash_ids": [1, "x"]}\n')
    said = ask("--trace", str(path), "--capacity", "5")
    assert said.code == 2
    assert said.err == f'tensorcache: {path}: line 2: hash_ids[1] must be a whole number, got "x"\n'
    assert said.out == ""


def test_a_size_beyond_all_memory_costs_none(ask: Ask, trace: Path) -> None:
    said = ask("--trace", str(trace), "--capacity", str(10**15), "--json")
    assert {json.loads(line)["block_hit_rate"] for line in said.out.splitlines()} == {0.9}


def test_what_a_line_says_of_its_size_is_not_believed(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "boast.jsonl"
    path.write_text(
        json.dumps({"input_length": MOST_BLOCKS * 10**6, "output_length": 10**15, "hash_ids": [1]})
    )
    said = ask("--trace", str(path), "--capacity", "5", "--policy", "ours", "--json")
    assert json.loads(said.out)["blocks"] == 1


def test_a_bar_on_a_terminal_leaves_stdout_alone(
    ask: Ask, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(console, "errors", Console(file=terminal, force_terminal=True, width=80))
    said = ask("--trace", str(trace), "--capacity", "2", "--policy", "lru", "--json")
    assert "lru at 2" in terminal.getvalue()
    assert json.loads(said.out)["policy"] == "lru"
