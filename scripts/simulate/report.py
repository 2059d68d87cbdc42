"""What was measured, for programs and for people: JSON lines, a table for each capacity, plots."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from scripts import plots
from scripts.console import console, say, show_table
from scripts.simulate.policies import INFINITE, OPTIMUM, OURS, TEXTBOOK
from scripts.simulate.replay import Measured
from scripts.simulate.trace import Trace

_COLUMNS = ("policy", "block hit rate", "way to the optimum", "µs a block")
_BEST = "best textbook"
_FEW_LINES = 3


def json_line(measured: Measured) -> str:
    """One policy at one capacity, as one JSON object."""
    fields = {
        "policy": measured.policy, "capacity": measured.capacity, "blocks": measured.blocks,
        "block_hit_rate": measured.block_hit_rate, "touch_us": round(measured.touch_us, 4),
    }  # fmt: skip
    return msgspec.json.encode(fields).decode()


def show_trace(trace: Trace) -> None:
    """What was replayed."""
    say(f"{trace.title}: {trace.requests:,} requests, {trace.blocks:,} blocks, {trace.distinct:,} distinct")
    if trace.foreign:
        say(
            f"note: its ids are not chained: {trace.foreign:,} distinct blocks are an id behind another "
            "prefix than before, and count as blocks of their own"
        )


def show_capacity(measured: Sequence[Measured]) -> None:
    """The table of one capacity."""
    best, optimum = _best(measured), _named(measured, OPTIMUM)
    rows = [
        (
            f"{one.policy} ({_BEST})" if one is best else one.policy,
            f"{one.block_hit_rate:.4f}",
            _way(one, best, optimum),
            "" if one.policy == INFINITE else f"{one.touch_us:.2f}",
        )
        for one in measured
    ]
    show_table(f"{measured[0].capacity:,} blocks", _COLUMNS, rows)


def show_plot(measured: Sequence[Measured]) -> None:
    """Hit rate by capacity in the terminal: all lines if they are few, else the ones that matter."""
    lines = _lines(measured)
    if len({one.capacity for one in measured}) < 2 or not lines:
        return
    if len(lines) > _FEW_LINES:
        lines = [line for line in lines if line.name in (OPTIMUM, OURS)] + _best_line(measured)
    say(plots.hit_rates_text(lines, width=min(console.width, 100)))


def save_plot(path: Path, measured: Sequence[Measured], *, title: str) -> None:
    """All lines into a file; OSError."""
    plots.save_hit_rates(path, _lines(measured), title=title)


def _best(measured: Sequence[Measured]) -> Measured | None:
    textbook = [one for one in measured if one.policy in TEXTBOOK]
    return max(textbook, key=lambda one: one.hits, default=None)


def _named(measured: Sequence[Measured], policy: str) -> Measured | None:
    return next((one for one in measured if one.policy == policy), None)


def _way(one: Measured, best: Measured | None, optimum: Measured | None) -> str:
    """From the best of the textbook, 0 %, to the optimum, 100 %."""
    if best is None or optimum is None or optimum.hits == best.hits:
        return ""
    if one is not best and one.policy not in (OURS, OPTIMUM):
        return ""
    return f"{(one.hits - best.hits) / (optimum.hits - best.hits):.0%}"


def _lines(measured: Sequence[Measured]) -> list[plots.Line]:
    found = []
    for policy in dict.fromkeys(one.policy for one in measured if one.policy != INFINITE):
        points = sorted((one for one in measured if one.policy == policy), key=lambda one: one.capacity)
        found.append(_line(policy, points))
    return found


def _best_line(measured: Sequence[Measured]) -> list[plots.Line]:
    """At every capacity the best of the textbook there."""
    capacities = sorted({one.capacity for one in measured})
    bests = [_best([one for one in measured if one.capacity == capacity]) for capacity in capacities]
    return [_line(_BEST, [best for best in bests if best is not None])] if bests[0] is not None else []


def _line(name: str, points: Sequence[Measured]) -> plots.Line:
    return plots.Line(
        name,
        [point.capacity for point in points],
        [point.block_hit_rate for point in points],
        strong=name in (OURS, OPTIMUM),
    )
