"""Plots: lines and bars into PNG or SVG files, and lines into text.

The one importer of matplotlib and plotext; both are imported when something is drawn. No display is needed,
and the same data gives the same bytes.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.errors import UsageError
from scripts.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
_TEXT_HEIGHT = 20
_MOST_TICKS = 8


@dataclass(frozen=True)
class Line:
    """One line of a plot; `strong` sets it off from the others."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    strong: bool = False


@dataclass(frozen=True)
class Labels:
    """What is written around a plot."""

    title: str
    x: str
    y: str


def check_plot_path(path: Path) -> None:
    """UsageError unless the name says a format that we write."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"a plot is written to a name that ends in {' or '.join(FORMATS)}, got {path}")


def save_hit_rates(path: Path, lines: Sequence[Line], *, title: str) -> None:
    """Block hit rate by capacity, capacities on a logarithmic axis; OSError."""
    labels = Labels(title, "capacity in blocks", "block hit rate")
    figure, axes = _figure(labels)
    for line in sorted(lines, key=lambda line: line.strong):
        width = 2.6 if line.strong else 1.3
        axes.plot(line.xs, line.ys, marker="o", markersize=3.5, linewidth=width, label=line.name)
    axes.set_xscale("log")
    _ticks_at(axes, sorted({x for line in lines for x in line.xs}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path)


def save_ttft_by_tier(path: Path, ttft_ms: Mapping[str, float], *, title: str) -> None:
    """Time to first token, a bar a tier in the order given, its value beside it; OSError."""
    figure, axes = _figure(Labels(title, "time to first token, ms", ""))
    names = list(ttft_ms)
    bars = axes.barh(names, [ttft_ms[name] for name in names])
    axes.bar_label(bars, labels=[_three_digits(ms) + " ms" for ms in ttft_ms.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)  # room for what is written behind the longest bar
    _save(figure, path)


def hit_rates_text(lines: Sequence[Line], *, width: int) -> str:
    """Block hit rate by capacity for a terminal: lines drawn with the letters that the last row explains."""
    import plotext

    figure = plotext.figure
    figure.clear()
    plotext.terminal.limit(False, False)
    figure.plot_size(width, _TEXT_HEIGHT)
    figure.title("block hit rate by capacity in blocks")
    letters = _letters([line.name for line in lines])
    for line, letter in zip(lines, letters, strict=True):
        places = [math.log10(x) for x in line.xs]  # its own logarithmic scale draws nothing
        figure.draw(figure.signal(places, list(line.ys), marker=letter).lines())
    ticks = _thinned(sorted({x for line in lines for x in line.xs}))
    figure.ruler("x").ticks([math.log10(x) for x in ticks], [f"{x:,.0f}" for x in ticks])
    text = "\n".join(row.rstrip() for row in figure.build().string(colorless=True).splitlines())
    legend = "   ".join(f"{letter} {line.name}" for line, letter in zip(lines, letters, strict=True))
    return f"{text.rstrip()}\n{legend}"


def _figure(labels: Labels) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(labels.title)
    axes.set_xlabel(labels.x)
    axes.set_ylabel(labels.y)
    return figure, axes


def _ticks_at(axes: "Axes", places: Sequence[float]) -> None:
    """Whole numbers, instead of powers of ten."""
    shown = _thinned(places)
    axes.set_xticks(shown, [f"{place:,.0f}" for place in shown])
    axes.minorticks_off()


def _save(figure: "Figure", path: Path) -> None:
    """The figure as a whole file, without the hour it was made."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_plot_path(path)
    FigureCanvasAgg(figure)
    drawn = io.BytesIO()
    if path.suffix.lower() == ".svg":
        with matplotlib.rc_context({"svg.hashsalt": "tensorcache"}):
            figure.savefig(drawn, format="svg", metadata={"Date": None})
    else:
        figure.savefig(drawn, format="png", dpi=150)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, drawn.getvalue())


def _three_digits(value: float) -> str:
    """Or more, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _thinned(places: Sequence[float]) -> list[float]:
    """The first, the last, and not too many between."""
    if len(places) <= _MOST_TICKS:
        return list(places)
    step = (len(places) - 1) / (_MOST_TICKS - 1)
    return [places[round(at * step)] for at in range(_MOST_TICKS)]


def _letters(names: Sequence[str]) -> list[str]:
    """For each name a letter of its own, its first if that is free."""
    taken: list[str] = []
    for name in names:
        wanted = f"{name}{name.upper()}*+#@%&=".replace(" ", "").replace("-", "")
        taken.append(next((letter for letter in wanted if letter not in taken), "."))
    return taken
