"""Sessions that begin at random times and run side by side, as one stream of requests in order of time."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from scripts.simulate.generate.draws import Draws
from scripts.simulate.trace_file import Request


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a session, so many seconds after the one before."""

    after_s: float
    chain: list[int]
    tokens_in: int
    tokens_out: int


Session = Iterator[Step]
_Waiting = tuple[float, int, Step, Session]


def side_by_side(draws: Draws, begin: Callable[[], Session], *, every_s: float) -> Iterator[Request]:
    """One session begins every `every_s` seconds on average; without end."""
    waiting: list[_Waiting] = []
    begins_s, count = 0.0, 0
    while True:
        if not waiting or begins_s <= waiting[0][0]:
            _wait(waiting, begins_s, count, begin())
            begins_s += draws.exponential(every_s)
            count += 1
            continue
        now_s, order, step, session = heapq.heappop(waiting)
        yield Request(round(now_s * 1000), step.tokens_in, step.tokens_out, step.chain)
        _wait(waiting, now_s, order, session)


def take(requests: Iterator[Request], count: int) -> Iterator[Request]:
    """The first `count`."""
    return islice(requests, count)


def _wait(waiting: list[_Waiting], now_s: float, order: int, session: Session) -> None:
    step = next(session, None)
    if step is not None:
        heapq.heappush(waiting, (now_s + step.after_s, order, step, session))
