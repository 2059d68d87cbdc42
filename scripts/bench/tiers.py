"""The room tiers: what they move, what a prompt in them costs, what eviction keeps; two plots."""

from pathlib import Path

from scripts import plots
from scripts.bench import evict, tier_lmdb, tier_redis, tier_ttft
from scripts.bench.harness import Measurement
from scripts.bench.subject import Subject
from scripts.simulate.replay import Measured
from scripts.simulate.report import save_plot

TTFT_PLOT, HIT_RATE_PLOT = Path("build/ttft_by_tier.svg"), Path("build/hit_rate_by_capacity.svg")
_ORDER = ("compute", "lmdb", "redis", "peer", "host", "lane")


class Tiers:
    """The measurements of one run, and what of it is drawn."""

    def __init__(self, subject: Subject, *, trace: Path) -> None:
        self._subject = subject
        self._trace = trace
        self._replayed: list[Measured] = []

    def measurements(self) -> list[Measurement]:
        """All measurements of this room."""
        home = self._subject.settings.folder
        return [
            *tier_redis.measurements(home),
            *tier_lmdb.measurements(home),
            *tier_ttft.measurements(self._subject),
            *evict.measurements(self._trace, self._replayed),
        ]

    def draw(self) -> list[Path]:
        """What there is to draw of what was measured; the files. OSError."""
        drawn: list[Path] = []
        seconds = self._subject.ttft_s
        if len(seconds) > 1:
            names = [name for name in _ORDER if name in seconds]
            names += [name for name in seconds if name not in _ORDER]
            shown = {name: 1e3 * seconds[name] for name in names}
            plots.save_ttft_by_tier(TTFT_PLOT, shown, title="1,024 tokens, by where their blocks are")
            drawn.append(TTFT_PLOT)
        if self._replayed:
            save_plot(HIT_RATE_PLOT, self._replayed, title=self._trace.name)
            drawn.append(HIT_RATE_PLOT)
        return drawn
