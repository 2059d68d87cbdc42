"""Runs measurements so that numbers can be trusted: sides alternate, medians count, a failure costs one row.

Invariants
- Ratios come from paired samples taken next to each other (A B A B …), so that a machine that slows down for
  a while slows both sides; the ratio of a row is the median of the ratios of the pairs.
- A measurement that fails gives `met: false` and the error for each of its rows still open; the others go on.
- A peer that is not there gives `met: null` and the reason.
"""

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scripts.bench.goals import GOALS
from scripts.bench.report import Row

Side = Callable[[], float]
"""One sample: seconds, or a rate; the two sides of a ratio return the same thing."""


class PeerMissingError(Exception):
    """The thing to compare with is not on this machine; the text says how to get it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a measurement found for one row."""

    name: str
    value: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Takes the numbers of `rows` together; `measure` yields a Reading for each of them, in any order."""

    rows: tuple[str, ...]
    measure: Callable[[], Iterable[Reading]]


@dataclass(frozen=True, slots=True)
class Paired:
    """Samples of two sides, taken in turn."""

    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of a/b over the pairs."""
        return statistics.median(x / y for x, y in zip(self.a, self.b, strict=True))

    @property
    def medians(self) -> tuple[float, float]:
        """Median of each side."""
        return statistics.median(self.a), statistics.median(self.b)


def alternate(a: Side, b: Side, *, rounds: int, warmups: int = 1) -> Paired:
    """Sample a, b, a, b, … `rounds` times each, after `warmups` rounds whose samples are dropped."""
    for _ in range(warmups):
        a()
        b()
    pairs = [(a(), b()) for _ in range(rounds)]
    return Paired(tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


def median_of(side: Side, *, rounds: int, warmups: int = 1) -> float:
    """Median of `rounds` samples of one side, after `warmups` dropped ones."""
    for _ in range(warmups):
        side()
    return statistics.median(side() for _ in range(rounds))


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def run(measurements: Sequence[Measurement], emit: Callable[[Row], None]) -> list[Row]:
    """Take every measurement: a Row for every name they promise, each given to `emit` once it is known."""
    rows: list[Row] = []
    for measurement in measurements:
        for row in _rows_of(measurement):
            rows.append(row)
            emit(row)
    return rows


def _rows_of(measurement: Measurement) -> Iterable[Row]:
    missing = list(measurement.rows)
    started = time.perf_counter()
    try:
        for reading in measurement.measure():
            missing.remove(reading.name)
            took = time.perf_counter() - started
            yield _measured(reading, took)
            started = time.perf_counter()
        problem, met = "the measurement gave no value", False
    except PeerMissingError as absent:
        problem, met = str(absent), None
    except Exception as error:  # whatever breaks one row must not cost the others; it is shown, not swallowed
        traceback.print_exc(file=sys.stderr)
        problem, met = f"{type(error).__name__}: {error}".splitlines()[0], False
    for name in missing:
        goal = GOALS[name]
        yield Row(name=name, value=None, unit=goal.unit, goal=goal.text, met=met, detail=problem)


def _measured(reading: Reading, took: float) -> Row:
    goal = GOALS[reading.name]
    detail = f"{reading.detail} [{took:.0f} s]" if reading.detail else f"[{took:.0f} s]"
    return Row(
        name=reading.name,
        value=reading.value,
        unit=goal.unit,
        goal=goal.text,
        met=goal.met_by(reading.value),
        detail=detail,
    )
