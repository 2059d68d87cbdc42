"""The recorded decodes of an engine: one CUDA graph for each (rows, window), the least used ones dropped.

Invariants
- A graph is recorded right after the same step ran by itself: TensorRT defers work to the first step of a
  shape, and that must not be recorded.
- The first recording that fails is the last one tried: steps go on without graphs, one log line says so.

NVIDIA's guide calls it undefined to launch a graph after its context was changed. TensorRT-LLM launches
graphs after their context was given other shapes all the same, and so do we; only a GPU can show that it
works.

Threads: one owner, inside `Device.current()`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from engines.cuda import Stream
from engines.cuda_graphs import CudaGraphRecorder, Graph, GraphRecorder
from engines.errors import DeviceError, StepError
from engines.windows import MAX_GRAPHS

log = logging.getLogger(__name__)

Key = tuple[int, int]
"""(rows, window)"""


def graph_recorder(*, wanted: bool) -> GraphRecorder | None:
    """What records graphs; None where they are not wanted or, with a log line, not possible."""
    if not wanted:
        return None
    try:
        return CudaGraphRecorder()
    except DeviceError as error:
        log.warning("decodes run without CUDA graphs: %s", error)
        return None


class StepGraphs:
    """Graphs by key. Without a recorder there are none."""

    def __init__(self, stream: Stream, recorder: GraphRecorder | None) -> None:
        self._stream = stream
        self._recorder = recorder
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def launch(self, key: Key) -> bool:
        """Run the graph of `key`; False if there is none. DeviceError; the graph that failed is dropped."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        self._graphs.move_to_end(key)
        try:
            graph.launch(self._stream.handle)
        except DeviceError:
            self._graphs.pop(key).close()
            raise
        return True

    def record(self, key: Key, enqueue: Callable[[], None]) -> None:
        """Keep what `enqueue` does, which just ran, as the graph of `key`."""
        if self._recorder is None:
            return
        try:
            self._graphs[key] = self._recorder.record(self._stream.handle, enqueue)
        except (DeviceError, StepError) as error:
            log.warning("decodes run without CUDA graphs from here on: rows=%d window=%d: %s", *key, error)
            self._recorder = None
            self.clear()
            return
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].close()

    def clear(self) -> None:
        """Drop every graph, because memory or a context moves. DeviceError."""
        while self._graphs:
            self._graphs.popitem()[1].close()
