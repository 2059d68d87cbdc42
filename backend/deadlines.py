"""Finds the sequences whose deadline has passed without looking at the others.

Threads: owned by the step loop.
"""

import heapq
from typing import Final

from backend.sequence import Sequence, State

_FEW: Final = 64


class Deadlines:
    """A heap by deadline. Those that ended are dropped when their time comes, or when they are the most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def watch(self, seq: Sequence, *, open_sequences: int) -> None:
        """Follow a sequence, if it has a deadline; `open_sequences` bounds what the heap keeps."""
        if seq.request.deadline is None:
            return
        if len(self._heap) > 2 * open_sequences + _FEW:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.ENDED]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (seq.request.deadline, seq.ticket, seq))

    def passed(self, now: float) -> list[Sequence]:
        """Open sequences whose deadline is `now` or before, each told once."""
        late: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            seq = heapq.heappop(self._heap)[2]
            if seq.state is not State.ENDED:
                late.append(seq)
        return late
