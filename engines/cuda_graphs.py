"""Records the kernels of a step once and launches them again as one: a CUDA graph.

TensorRT enqueues hundreds of kernels a step; launching them as a graph takes the CPU out of that.
Recording goes through the driver's own calls, so that no CUDA runtime library is needed beside the one
that TensorRT brings.

Invariants
- Recording runs nothing. What is recorded keeps the addresses and shapes of that moment: whoever moves
  memory or a context must drop the graph first.

Threads: recording forbids unsafe calls to the recording thread alone: other threads may allocate meanwhile.
"""

from collections.abc import Callable
from typing import Any, Protocol

from engines.driver import GPU_EXTRAS
from engines.errors import DeviceError


class Graph(Protocol):
    """A recorded step."""

    def launch(self, stream: int) -> None:
        """Run it in `stream`. DeviceError."""
        ...

    def close(self) -> None:
        """Free it. Idempotent."""
        ...


class GraphRecorder(Protocol):
    """Makes graphs."""

    def record(self, stream: int, enqueue: Callable[[], None]) -> Graph:
        """What `enqueue` puts into `stream`, as a graph; whatever `enqueue` raises, recording has ended."""
        ...


class CudaGraphRecorder:
    """Records through cuda.bindings. DeviceError where that package is missing."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(
                f"CUDA graphs: expected the package cuda-bindings, found none ({error}): {GPU_EXTRAS}"
            ) from error
        self._driver = driver

    def record(self, stream: int, enqueue: Callable[[], None]) -> Graph:
        """See `GraphRecorder.record`."""
        driver = self._driver
        queue = driver.CUstream(stream)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _checked(driver, "cuStreamBeginCapture", queue, mode)
        try:
            enqueue()
            recorded = _checked(driver, "cuStreamEndCapture", queue)
        except BaseException:
            # what was recorded is of no use, but the stream must leave this mode, whatever it answers
            _, recorded = driver.cuStreamEndCapture(queue)
            _drop(driver, recorded)
            raise
        try:
            return _LaunchableGraph(driver, _checked(driver, "cuGraphInstantiate", recorded, 0))
        finally:
            _drop(driver, recorded)


class _LaunchableGraph:
    def __init__(self, driver: Any, graph: Any) -> None:
        self._driver = driver
        self._graph = graph

    def launch(self, stream: int) -> None:
        _checked(self._driver, "cuGraphLaunch", self._graph, self._driver.CUstream(stream))

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            _checked(self._driver, "cuGraphExecDestroy", graph)


def _drop(driver: Any, recorded: Any) -> None:
    if recorded is not None and int(recorded) != 0:
        driver.cuGraphDestroy(recorded)


def _checked(driver: Any, name: str, *arguments: Any) -> Any:
    """Call the driver; its answer is a tuple of the result code and at most one value."""
    result, *values = getattr(driver, name)(*arguments)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"cuda: {name} failed: {result.name}")
    return values[0] if values else None
