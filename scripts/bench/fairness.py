"""The row of fairness: how long one tenant waits for a first token while another asks for all there is.

The victim comes at its own pace, whatever the answers take: so often that it has one request open on the
average, however fast the machine is. Beside it the flooder has either hundreds of requests
open, or, by its own restraint, as many as its fair share: half of the lanes. Both take turns, so that a
machine that slows down for a while slows both.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from backend.access import Access, AuditLog, Caller, NoLimits, Verb
from backend.settings import ModelSettings
from cachemgr import NamespaceShare
from scripts.bench.cache import block_format, opened_cache
from scripts.bench.decoder import Decoder, Heard, decoder
from scripts.bench.harness import Measurement, Reading
from scripts.bench.subject import Subject

ROW = "fair.ttft_p99.flood_vs_share"
_LANES, _MAX_SEQ_LEN, _HOST_BYTES = 8, 512, 1 << 30
_VICTIM, _FLOODER = "victim", "flooder"
_VICTIM_PROMPT, _VICTIM_ANSWER, _VICTIMS_AT_ONCE = 64, 8, 1
_FLOOD_PROMPT, _FLOOD_ANSWER, _FLOOD = 256, 64, 300
_TURNS, _OF_A_TURN, _OF_THE_PACE = 4, 50, 12
_TICK_S = 0.003
_WARM_S = 3.0


def measurements(subject: Subject) -> list[Measurement]:
    """The one row."""
    return [Measurement((ROW,), partial(_fairness, subject))]


@dataclass
class _Side:
    """What was seen with one kind of flooder."""

    open_at_once: int
    ttft_s: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def p99_s(self) -> float:
        """Of the victim's times to a first token."""
        return statistics.quantiles(self.ttft_s, n=100, method="inclusive")[98]

    def __str__(self) -> str:
        """As the table shows it."""
        p50 = statistics.median(self.ttft_s)
        return (
            f"p99 {1e3 * self.p99_s:.0f} ms, p50 {1e3 * p50:.0f} ms, {self.tokens / self.seconds:.0f} tok/s"
        )


def _fairness(subject: Subject) -> Iterator[Reading]:
    settings = ModelSettings(max_queue_size=4 * _FLOOD)
    with subject.engine(lanes=_LANES, max_seq_len=_MAX_SEQ_LEN) as engine:
        layout = block_format(engine.spec)
        with (
            opened_cache(subject.settings.folder, layout, host_bytes=_HOST_BYTES) as (cache, *_),
            decoder(engine, cache, release=subject.release(), settings=settings, access=_tenants()) as asked,
        ):
            flood, share = _Side(_FLOOD), _Side(_LANES // 2)
            every_s = _pace(subject, asked, share.open_at_once)
            for _ in range(_TURNS):
                for side in (share, flood):
                    _turn(subject, asked, side, every_s=every_s)
    count = len(flood.ttft_s)
    detail = f"{count} requests each, {every_s:.2f} s apart: flood {flood}; held to its share {share}"
    yield Reading(ROW, flood.p99_s / share.p99_s, detail)


def _pace(subject: Subject, asked: Decoder, open_at_once: int) -> float:
    """Seconds between two requests of the victim, by what an answer takes beside a restrained flooder."""
    with _flooding(subject, asked, open_at_once):
        time.sleep(_WARM_S)
        took = []
        for _ in range(_OF_THE_PACE):
            prompt = subject.prompt(_VICTIM_PROMPT)
            heard = asked.ask(prompt, max_tokens=_VICTIM_ANSWER, api_key=_VICTIM).wait()
            took.append(heard.arrivals[-1] - heard.asked)
    return statistics.median(took) / _VICTIMS_AT_ONCE


def _turn(subject: Subject, asked: Decoder, side: _Side, *, every_s: float) -> None:
    with _flooding(subject, asked, side.open_at_once) as flooded:
        time.sleep(_WARM_S)
        began, before = time.perf_counter(), flooded()
        answers: list[Heard] = []
        for number in range(_OF_A_TURN):
            time.sleep(max(0.0, began + number * every_s - time.perf_counter()))
            prompt = subject.prompt(_VICTIM_PROMPT)
            answers.append(asked.ask(prompt, max_tokens=_VICTIM_ANSWER, api_key=_VICTIM))
        side.ttft_s += [heard.wait().ttft_s for heard in answers]
        side.tokens += flooded() - before + sum(heard.tokens for heard in answers)
        side.seconds += time.perf_counter() - began


@contextmanager
def _flooding(subject: Subject, asked: Decoder, open_at_once: int) -> Iterator[Callable[[], int]]:
    """Keep so many requests of the flooder open; gives the count of the tokens that it was sent."""
    done = threading.Event()
    every: list[Heard] = []

    def flood() -> None:
        running: list[Heard] = []
        while not done.wait(_TICK_S):
            running = [heard for heard in running if not heard.ended.is_set()]
            while len(running) < open_at_once:
                prompt = subject.prompt(_FLOOD_PROMPT)
                running.append(asked.ask(prompt, max_tokens=_FLOOD_ANSWER, api_key=_FLOODER))
                every.append(running[-1])

    thread = threading.Thread(target=flood, name="flooder")
    thread.start()
    try:
        yield lambda: sum(heard.tokens for heard in list(every))
    finally:
        done.set()
        thread.join()
        for heard in every:
            heard.gone = True
        for heard in every:
            heard.wait()


class _Tenants:
    """An Authoriser who believes what it is told: a credential is a name."""

    principals = 2

    def authorise(self, parameters: Mapping[str, object], *, verb: Verb) -> Caller:
        """See backend.access.Authoriser."""
        name = str(parameters["api_key"])
        return Caller(name, name, frozenset(Verb) - {Verb.ADMIN})

    def follow(self, listener: Callable[[Mapping[str, NamespaceShare]], None]) -> None:
        """See backend.access.Authoriser."""

    def close(self) -> None:
        """Nothing to close."""


def _tenants() -> Access:
    return Access(_Tenants(), NoLimits(), AuditLog("bench"))
