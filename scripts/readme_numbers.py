"""Puts the bench's numbers into the README, between its two marks: a table made from build/bench.json."""

import sys
from pathlib import Path

import msgspec

from scripts.console import complain, say

BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
_VERDICTS = {True: "yes", False: "no", None: "not measured"}


class Number(msgspec.Struct, frozen=True):
    """One row of bench.json, as far as the table shows it."""

    name: str
    value: float | None
    unit: str
    goal: str
    met: bool | None
    detail: str = ""


def table(rows: list[Number]) -> str:
    """A markdown table."""
    lines = ["| row | value | goal | met |", "|---|---:|---:|---|"]
    for row in rows:
        value = (
            "–" if row.value is None else f"{row.value:.4g} {'' if row.unit == 'ratio' else row.unit}".strip()
        )
        lines.append(f"| {row.name} | {value} | {row.goal} | {_VERDICTS[row.met]} |")
    return "\n".join(lines)


def with_numbers(readme: str, rows: list[Number]) -> str:
    """`readme` with what stands between the marks replaced."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def main(numbers: str = "build/bench.json", readme: str = "README.md") -> int:
    """Rewrite the README; exit code 1 if the bench has not been run."""
    if not Path(numbers).is_file():
        complain(f"{numbers} is not there: run `make bench` first")
        return 1
    rows = msgspec.json.decode(Path(numbers).read_bytes(), type=list[Number])
    Path(readme).write_text(with_numbers(Path(readme).read_text(), rows))
    say(f"wrote        {len(rows)} rows into {readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
