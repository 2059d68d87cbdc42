"""Chooses who gives a lane back when one principal holds more than half of them and another waits.

The youngest goes: it has least to lose. Before it go those whose prefill has not begun, and those that the
cache can restore go before those that are computed again from their first token. Who was chosen
MAX_PREEMPTIONS times is left alone as long as there is anybody else; then the youngest goes in any case, or
long answers would in time hold all lanes against everybody. Every sequence ends however many others come:
half of the lanes stay with those that have had theirs longest, and who was preempted goes on before all that
have not begun.

Threads: owned by the step loop.
"""

from collections.abc import Sequence
from typing import Final

from backend.sequence import Sequence as Running
from backend.sequence import State

MAX_PREEMPTIONS: Final = 3


def choose(running: Sequence[Running], principal: str) -> Running | None:
    """The sequence of `principal` to preempt; `running` has the oldest first. None: it has none there."""
    youngest_first = (seq for seq in reversed(running) if seq.request.principal == principal)
    return min(youngest_first, key=_loss, default=None)


def _loss(seq: Running) -> int:
    if seq.preemptions >= MAX_PREEMPTIONS:
        return 3
    if seq.state is State.PREFILL and seq.written == seq.prefill_start:
        return 0
    return 1 if seq.hashes and seq.request.reads_cache and seq.request.writes_cache else 2
