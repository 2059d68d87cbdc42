"""Rows of the bench as a table for people and as bench.json for machines."""

import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of bench.json. `met` is None where there is nothing to compare with; `detail` says why."""

    name: str
    value: float | None
    unit: str
    goal: str
    met: bool | None
    detail: str


_VERDICT = {True: "yes", False: "NO", None: "-"}


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the list of rows; readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode([_plain(row) for row in rows]), indent=2)
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(data + b"\n")
    partial.replace(path)


def read_json(path: Path) -> list[Row]:
    """The rows of an earlier run."""
    return msgspec.json.decode(path.read_bytes(), type=list[Row])


def _plain(row: Row) -> Row:
    """JSON has no NaN and no infinity."""
    if row.value is None or math.isfinite(row.value):
        return row
    return msgspec.structs.replace(row, value=None, met=False, detail=f"value {row.value}; {row.detail}")


def number_text(value: float | None) -> str:
    """Four significant digits, plainly written."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 6)}f}"


def table(rows: Sequence[Row]) -> str:
    """Aligned columns: row, value, unit, goal, met, detail."""
    header = ("row", "value", "unit", "goal", "met", "detail")
    cells = [header] + [
        (row.name, number_text(row.value), row.unit, row.goal, _VERDICT[row.met], row.detail) for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header) - 1)]
    return "\n".join(_line(line, widths) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, value, *others = (cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
    return "  ".join((name, value.strip().rjust(widths[1]), *others, cells[-1])).rstrip()


def summary(rows: Sequence[Row]) -> str:
    """How many goals were met and missed, and how many rows had nothing to be compared with."""
    met = sum(row.met is True for row in rows)
    missed = sum(row.met is False for row in rows)
    return f"{met} met, {missed} missed, {len(rows) - met - missed} not compared"


def machine_line(now: float | None = None) -> str:
    """CPU, cores this process may use, Python, load before the bench, date."""
    cores = len(os.sched_getaffinity(0))
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    load = os.getloadavg()[0]
    return f"{_cpu_name()}, {cores} cores, load {load:.1f}, Python {platform.python_version()}, {date}"


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    family, model = fields.get("cpu family"), fields.get("model")
    return f"{name} (family {family}, model {model})" if family and model else name
