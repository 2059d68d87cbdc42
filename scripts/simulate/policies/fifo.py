"""FIFO: what came first goes first, used or not.

Its classic study is Belady, Nelson, Shedler, "An anomaly in space-time characteristics of certain programs
running in a paging machine", CACM 1969.
"""

from collections import OrderedDict


class Fifo:
    """A queue."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._queue

    def touch(self, block: int) -> None:
        """See Policy."""
        queue = self._queue
        if block in queue:
            return
        if len(queue) >= self._capacity:
            queue.popitem(last=False)
        queue[block] = None
