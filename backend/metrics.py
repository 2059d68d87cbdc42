"""What operators see of requests: histograms and gauges on the metrics page, one log line per request.

The step loop only appends a record when a request ends; the replies thread turns records into log lines and
metric updates. Nothing happens per token.

Threads: `ended` on the step loop; `refused` and `swapped` on any; `publish` on the replies thread.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from backend.printable import printable
from backend.sequence import Sequence as Running
from cachemgr import metric_text

log = logging.getLogger(__name__)

PREFIX: Final = "tensorcache_"
TTFT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TPOT_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
GAUGES_EVERY_S: Final = 1.0
MAX_REFUSAL_LINES: Final = 20
"""Between two refreshes of the gauges: whoever floods us with what is refused must not fill the log."""
SWAPPED: Final = "ok"

_ENDED: Final = ("requests_total", "Requests that ended, by reason")
_REFUSED: Final = (
    "requests_refused_total",
    "Requests that were turned away before they were queued, by reason",
)
_SWAPS: Final = ("swaps_total", "Attempts to swap the release, by outcome")
_SWAP_REFUSALS: Final = ("swap_refusals_total", "Releases that a swap refused, by the check that did")

Labels = Mapping[str, str]


class Reading(NamedTuple):
    """A number kept elsewhere: a total if `name` ends in _total, else a gauge; `tier` becomes a label."""

    name: str
    value: float
    tier: str = ""


class Counter(Protocol):
    """Only grows."""

    def increment(self, amount: float) -> None:
        """Add `amount` ≥ 0."""
        ...


class Gauge(Protocol):
    """Goes up and down."""

    def set(self, value: float) -> None:
        """Replace the value."""
        ...


class Histogram(Protocol):
    """Counts observations by size."""

    def observe(self, value: float) -> None:
        """Count one observation."""
        ...


class Instruments(Protocol):
    """Makes metrics; names are given without prefix."""

    def counter(self, name: str, description: str, labels: Labels) -> Counter:
        """A counter of the family `name`."""
        ...

    def gauge(self, name: str, description: str, labels: Labels) -> Gauge:
        """A gauge of the family `name`."""
        ...

    def histogram(
        self, name: str, description: str, labels: Labels, *, buckets: Sequence[float]
    ) -> Histogram:
        """A histogram of the family `name`; `buckets` are upper bounds."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the backend is: the gauges, measured together by the step loop."""

    requests_waiting: int = 0
    principals_waiting: int = 0
    requests_running: int = 0
    queued_prefill_tokens: int = 0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0

    def __add__(self, other: "Load") -> "Load":
        """Both together."""
        return Load(
            requests_waiting=self.requests_waiting + other.requests_waiting,
            principals_waiting=max(self.principals_waiting, other.principals_waiting),
            requests_running=self.requests_running + other.requests_running,
            queued_prefill_tokens=self.queued_prefill_tokens + other.queued_prefill_tokens,
            kv_tokens_used=self.kv_tokens_used + other.kv_tokens_used,
            kv_tokens_capacity=self.kv_tokens_capacity + other.kv_tokens_capacity,
        )


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is worth knowing of a request that ended. Times in seconds; TTFT None: it never got a token."""

    request_id: str
    release: str
    outcome: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """What is known of a request that was turned away; `reason` is the name of the error."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Swap:
    """A swap that ended: "ok", or what refused it."""

    reason: str


_LOAD_HELP: Final = {
    "requests_waiting": "Requests without a lane",
    "principals_waiting": "Principals with requests that have no lane",
    "requests_running": "Requests that own a lane",
    "queued_prefill_tokens": "Prompt tokens not computed yet",
    "kv_tokens_used": "Positions of running requests that hold KV",
    "kv_tokens_capacity": "Positions of all lanes together",
}


class RequestMetrics:
    """Collects ended requests and publishes them with the gauges."""

    def __init__(
        self,
        instruments: Instruments,
        labels: Labels,
        *,
        release: str,
        readings: Callable[[], Iterable[Reading]],
        clock: Callable[[], float],
    ) -> None:
        """`readings` gives what other parts count; called about once a second, on the replies thread."""
        self._instruments = instruments
        self._labels = dict(labels)
        self.release = release
        """The one that serves: what the log names for requests that none has read."""
        self._readings = readings
        self._clock = clock
        self._ended: deque[EndedRequest | RefusedRequest | _Swap] = deque()
        self._next_gauges = 0.0
        self._refusals = 0
        self._outcomes: dict[tuple[str, str], Counter] = {}
        self._gauges: dict[tuple[str, str], Gauge] = {}
        self._totals: dict[tuple[str, str], tuple[Counter, float]] = {}
        self.load: Callable[[], Load] = Load
        self._input = self._count("input_tokens_total", "Prompt tokens of ended requests")
        self._output = self._count("output_tokens_total", "Tokens generated by ended requests")
        self._cached = self._count(
            "cached_tokens_total", "Prompt tokens of ended requests not computed again"
        )
        self._ttft = instruments.histogram(
            "ttft_seconds", "Time to first token", self._labels, buckets=TTFT_BUCKETS
        )
        self._tpot = instruments.histogram(
            "tpot_seconds", "Time per output token after the first", self._labels, buckets=TPOT_BUCKETS
        )

    def ended(self, seq: Running, *, outcome: str, now: float) -> None:
        """Keep a record for `publish`, but not of a supervisor's probe."""
        if seq.request.probe:
            return
        first, received, output = seq.first_token_at, seq.request.received, seq.output_tokens
        self._ended.append(
            EndedRequest(
                request_id=seq.request.request_id,
                release=seq.request.release,
                outcome=outcome,
                input_tokens=seq.prompt_tokens,
                output_tokens=output,
                cached_tokens=seq.cached_tokens,
                ttft_s=None if first is None else first - received,
                tpot_s=None if first is None or output < 2 else (now - first) / (output - 1),
                total_s=now - received,
            )
        )

    def refused(self, request_id: str, *, reason: str) -> None:
        """Keep a record for `publish`."""
        self._ended.append(RefusedRequest(request_id, reason))

    def swapped(self, reason: str) -> None:
        """Count a swap that ended: "ok", or what refused it."""
        self._ended.append(_Swap(reason))

    def publish(self) -> None:
        """Log and count what ended; refresh the gauges about once a second."""
        while self._ended:
            ended = self._ended.popleft()
            if isinstance(ended, RefusedRequest):
                self._publish_refused(ended)
            elif isinstance(ended, _Swap):
                self._publish_swap(ended)
            else:
                self._publish_ended(ended)
        now = self._clock()
        if now >= self._next_gauges:
            self._next_gauges = now + GAUGES_EVERY_S
            self._settle_refusals()
            self._publish_gauges()

    def _publish_ended(self, ended: EndedRequest) -> None:
        log.info(
            "request id=%s release=%s input=%d output=%d cached=%d ttft_ms=%s total_ms=%.1f reason=%s",
            printable(ended.request_id),
            ended.release,
            ended.input_tokens,
            ended.output_tokens,
            ended.cached_tokens,
            "-" if ended.ttft_s is None else f"{ended.ttft_s * 1e3:.1f}",
            ended.total_s * 1e3,
            ended.outcome,
        )
        self._count_reason(*_ENDED, ended.outcome)
        self._input.increment(ended.input_tokens)
        self._output.increment(ended.output_tokens)
        self._cached.increment(ended.cached_tokens)
        if ended.ttft_s is not None:
            self._ttft.observe(ended.ttft_s)
        if ended.tpot_s is not None:
            self._tpot.observe(ended.tpot_s)

    def _publish_refused(self, refused: RefusedRequest) -> None:
        self._refusals += 1
        if self._refusals <= MAX_REFUSAL_LINES:
            shown = printable(refused.request_id)
            log.info("request id=%s release=%s refused reason=%s", shown, self.release, refused.reason)
        self._count_reason(*_ENDED, refused.reason)
        self._count_reason(*_REFUSED, refused.reason)

    def _settle_refusals(self) -> None:
        """Say how many lines were left out since the last time."""
        left_out, self._refusals = self._refusals - MAX_REFUSAL_LINES, 0
        if left_out > 0:
            log.info("%d more requests refused: too many for a line each", left_out)

    def _publish_swap(self, swap: _Swap) -> None:
        self._count_reason(*_SWAPS, swap.reason)
        if swap.reason != SWAPPED:
            self._count_reason(*_SWAP_REFUSALS, swap.reason)

    def _count_reason(self, name: str, description: str, reason: str) -> None:
        counter = self._outcomes.get((name, reason))
        if counter is None:
            labels = {**self._labels, "reason": reason}
            counter = self._outcomes[name, reason] = self._instruments.counter(name, description, labels)
        counter.increment(1)

    def _publish_gauges(self) -> None:
        load = self.load()
        for name, description in _LOAD_HELP.items():
            self._set(name, description, getattr(load, name))
        for reading in self._readings():
            if reading.name.endswith("_total"):
                self._raise_total(reading)
            else:
                self._set(reading.name, metric_text(reading.name), reading.value, tier=reading.tier)

    def _set(self, name: str, description: str, value: float, *, tier: str = "") -> None:
        gauge = self._gauges.get((name, tier))
        if gauge is None:
            gauge = self._instruments.gauge(name, description, self._labels_of(tier))
            self._gauges[name, tier] = gauge
        gauge.set(value)

    def _raise_total(self, reading: Reading) -> None:
        """Triton's counters can be added to, not set: add what is new."""
        key = (reading.name, reading.tier)
        if key not in self._totals:
            counter = self._instruments.counter(key[0], metric_text(key[0]), self._labels_of(reading.tier))
            self._totals[key] = (counter, 0.0)
        counter, published = self._totals[key]
        if reading.value > published:
            counter.increment(reading.value - published)
            self._totals[key] = (counter, reading.value)

    def _labels_of(self, tier: str) -> Labels:
        return {**self._labels, "tier": tier} if tier else self._labels

    def _count(self, name: str, description: str) -> Counter:
        return self._instruments.counter(name, description, self._labels)
