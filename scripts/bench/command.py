"""The command line of the bench: choose rooms, take the measurements, print the table, write bench.json."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.goals import ROOMS, Room
from scripts.bench.harness import Measurement, run
from scripts.bench.peers import DEFAULT_PYTHON
from scripts.bench.report import Row, machine_line, number_text, summary, table, write_json
from scripts.bench.subject import BenchSettings, Subject

EXAMPLES = """
examples:
  tensorcache bench                          # everything: some minutes
  tensorcache bench --only cache             # one room
  python -m scripts.bench.peers_install      # llama.cpp and OpenVINO, to compare with
"""


def parser() -> argparse.ArgumentParser:
    """The bench's arguments."""
    top = argparse.ArgumentParser(
        prog="tensorcache bench",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--only", choices=ROOMS, action="append", help="one room (may be repeated); default all")
    top.add_argument("--row", metavar="TEXT", default="", help="only rows whose name contains TEXT")
    top.add_argument(
        "--peers-python", type=Path, default=DEFAULT_PYTHON, help="Python of the peers' environment"
    )
    top.add_argument("--threads", type=int, default=2, help="threads of every engine (default %(default)s)")
    top.add_argument("--folder", type=Path, default=Path("build/bench"), help="for releases, keys and logs")
    top.add_argument("--out", type=Path, default=Path("build/bench.json"), help="default %(default)s")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Take the measurements; the exit code says that the bench ran, not that goals were met."""
    arguments = parser().parse_args(argv)
    settings = BenchSettings(
        folder=arguments.folder.resolve(),
        peers_python=arguments.peers_python.absolute(),
        threads=arguments.threads,
    )
    settings.folder.mkdir(parents=True, exist_ok=True)
    machine = machine_line()
    started = time.perf_counter()
    chosen = _chosen(Subject(settings), arguments.only or ROOMS, arguments.row)
    rows = run(chosen, _say)
    write_json(rows, arguments.out)
    took = time.perf_counter() - started
    print(f"\n{table(rows)}\n\n{machine}\n{summary(rows)}, {took:.0f} s → {arguments.out}")
    return 0


def _chosen(subject: Subject, rooms: Sequence[Room], text: str) -> list[Measurement]:
    from scripts.bench import backend, cache, engine

    of_room = {"engine": engine.measurements, "backend": backend.measurements, "cache": cache.measurements}
    every = [measurement for room in ROOMS if room in rooms for measurement in of_room[room](subject)]
    return [measurement for measurement in every if any(text in name for name in measurement.rows)]


def _say(row: Row) -> None:
    verdict = {True: "met", False: "NOT met", None: "not compared"}[row.met]
    print(
        f"{row.name}: {number_text(row.value)} {row.unit} (goal {row.goal}: {verdict}) {row.detail}",
        flush=True,
    )
