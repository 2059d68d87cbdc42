"""Puts the bench's numbers into the README, between two marks: a table made from build/bench.json.

python -m scripts.readme_numbers
python -m scripts.readme_numbers build/bench-gpu.json README.md gpu-numbers "NVIDIA H100, …"
"""

import sys
from pathlib import Path

import msgspec

from scripts.console import complain, say

MARKS = "numbers"
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
        met = "–" if row.goal == "none" and row.value is not None else _VERDICTS[row.met]
        lines.append(f"| {row.name} | {value} | {row.goal} | {met} |")
    return "\n".join(lines)


def with_numbers(readme: str, rows: list[Number], *, marks: str = MARKS, heading: str = "") -> str:
    """`readme` with what stands between the marks replaced by `heading` and the table."""
    begin, end = f"<!-- {marks}:begin -->", f"<!-- {marks}:end -->"
    before, rest = readme.split(begin)
    _, after = rest.split(end)
    shown = f"{heading}\n\n{table(rows)}" if heading else table(rows)
    return f"{before}{begin}\n{shown}\n{end}{after}"


def main(
    numbers: str = "build/bench.json", readme: str = "README.md", marks: str = MARKS, heading: str = ""
) -> int:
    """Rewrite the README; exit code 1 if the bench has not been run."""
    if not Path(numbers).is_file():
        complain(f"{numbers} is not there: run `make bench` first")
        return 1
    rows = msgspec.json.decode(Path(numbers).read_bytes(), type=list[Number])
    Path(readme).write_text(with_numbers(Path(readme).read_text(), rows, marks=marks, heading=heading))
    say(f"wrote        {len(rows)} rows into {readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
