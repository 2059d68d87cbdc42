"""The command line of the bench: choose rooms, take the measurements, print the table, write bench.json."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import DeviceError
from scripts.bench.goals import EVERYWHERE, ROOMS, Room
from scripts.bench.gpu_ready import require
from scripts.bench.harness import Measurement, run
from scripts.bench.peers import DEFAULT_PYTHON
from scripts.bench.report import Row, machine_line, number_text, summary, table, write_json
from scripts.bench.subject import BenchSettings, Subject

if TYPE_CHECKING:
    from scripts.bench.tiers import Tiers

DEFAULT_TRACE = Path("build/traces/conversation_trace.jsonl")

EXAMPLES = """
examples:
  tensorcache bench                          # everything: some minutes
  tensorcache bench --only cache             # one room
  tensorcache bench --only tiers --trace conversation_trace.jsonl
  tensorcache bench --only gpu               # on a GPU node; the numbers go to build/bench-gpu.json
  python -m scripts.bench.peers_install      # llama.cpp and OpenVINO, to compare with
"""


def parser() -> argparse.ArgumentParser:
    """The bench's arguments."""
    top = argparse.ArgumentParser(
        prog="tensorcache bench",
        description="measure against the goals and against peers",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--only", choices=ROOMS, action="append", help="one room (may be repeated); default all but gpu"
    )
    top.add_argument("--row", metavar="TEXT", default="", help="only rows whose name contains TEXT")
    top.add_argument(
        "--peers-python", type=Path, default=DEFAULT_PYTHON, help="Python of the peers' environment"
    )
    top.add_argument(
        "--trace", type=Path, default=DEFAULT_TRACE, metavar="FILE",
        help="Mooncake's conversation trace, to replay in the room tiers (default %(default)s)",
    )  # fmt: skip
    top.add_argument("--threads", type=int, default=2, help="threads of every engine (default %(default)s)")
    top.add_argument("--folder", type=Path, default=Path("build/bench"), help="for releases, keys and logs")
    top.add_argument(
        "--out", type=Path, help="default build/bench.json, for the room gpu alone build/bench-gpu.json"
    )
    top.add_argument(
        "--precision", choices=("float16", "bfloat16"), default="float16", help="of the room gpu's engines"
    )
    top.add_argument(
        "--without-8b", action="store_true", help="leave out the 8B-shaped engine of the room gpu"
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Take the measurements; the exit code says that the bench ran, not that goals were met."""
    options = parser()
    arguments = options.parse_args(argv)
    if arguments.trace != DEFAULT_TRACE and not arguments.trace.is_file():  # found out minutes later, else
        options.error(f"argument --trace: no such file: {arguments.trace}")
    rooms: Sequence[Room] = arguments.only or EVERYWHERE
    machine = machine_line()
    if "gpu" in rooms:
        try:
            machine = f"{require().line}; {machine}"
        except DeviceError as error:
            print(f"tensorcache bench: the room gpu needs a GPU node: {error}", file=sys.stderr)
            return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing stays in /dev/shm
    arguments.folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    chosen, tiers = _chosen(arguments, rooms)
    rows = run(chosen, _say)
    out = arguments.out or Path("build/bench-gpu.json" if set(rooms) == {"gpu"} else "build/bench.json")
    write_json(rows, out)
    took = time.perf_counter() - started
    print(f"\n{table(rows)}\n\n{machine}\n{summary(rows)}, {took:.0f} s → {out}")
    for plot in tiers.draw():
        print(f"plot → {plot}")
    return 0


def _chosen(arguments: argparse.Namespace, rooms: Sequence[Room]) -> "tuple[list[Measurement], Tiers]":
    from scripts.bench import backend, cache, cluster, engine, fairness, gpu, hot, moves, peer, ring, tag
    from scripts.bench.gpu_subject import GpuSubject
    from scripts.bench.tiers import Tiers

    folder = arguments.folder.resolve()
    settings = BenchSettings(
        folder=folder, peers_python=arguments.peers_python.absolute(), threads=arguments.threads
    )
    subject = Subject(settings)
    with_gpu = GpuSubject(folder, precision=arguments.precision, with_8b=not arguments.without_8b)
    tiers = Tiers(subject, trace=arguments.trace)
    of_room: dict[Room, list[Measurement]] = {
        "engine": engine.measurements(subject),
        "backend": backend.measurements(subject),
        "cache": cache.measurements(subject),
        "cluster": [
            *ring.measurements(),
            *peer.measurements(subject),
            *cluster.measurements(subject),
            *hot.measurements(),
            *moves.measurements(),
        ],
        "tiers": tiers.measurements(),
        "access": [*tag.measurements(), *fairness.measurements(subject)],
        "gpu": gpu.measurements(gpu.How(with_gpu)),
    }
    every = [measurement for room in ROOMS if room in rooms for measurement in of_room[room]]
    chosen = [measurement for measurement in every if any(arguments.row in name for name in measurement.rows)]
    return chosen, tiers


def _say(row: Row) -> None:
    verdict = {True: "met", False: "NOT met", None: "not compared"}[row.met]
    print(
        f"{row.name}: {number_text(row.value)} {row.unit} (goal {row.goal}: {verdict}) {row.detail}",
        flush=True,
    )
