"""Recorded steps: kept by shape, bounded, dropped before memory moves, done without where recording fails."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from engines import step_graphs
from engines.errors import DeviceError, StepError
from engines.step_graphs import StepGraphs, graph_recorder

SMALL, LARGE = (1, 256), (8, 512)


class Stream:
    handle = 4711


class Recorder:
    """Graphs that run what was enqueued while they were recorded."""

    def __init__(self) -> None:
        self.live = 0
        self.asked = 0
        self.failure: Exception | None = None

    def record(self, stream: int, enqueue: Callable[[], None]) -> Any:
        assert stream == Stream.handle
        self.asked += 1
        enqueue()
        if self.failure is not None:
            raise self.failure
        self.live += 1
        return Recorded(self, enqueue)


class Recorded:
    def __init__(self, recorder: Recorder, enqueue: Callable[[], None]) -> None:
        self._recorder = recorder
        self._enqueue: Callable[[], None] | None = enqueue

    def launch(self, stream: int) -> None:
        assert self._enqueue is not None, "launched after close"
        assert stream == Stream.handle
        if self._recorder.failure is not None:
            raise self._recorder.failure
        self._enqueue()

    def close(self) -> None:
        if self._enqueue is not None:
            self._recorder.live -= 1
        self._enqueue = None


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def graphs(recorder: Recorder) -> StepGraphs:
    return StepGraphs(Stream(), recorder)  # type: ignore[arg-type]


def test_a_shape_runs_what_was_recorded_for_it(graphs: StepGraphs) -> None:
    ran: list[str] = []
    assert not graphs.launch(SMALL)
    graphs.record(SMALL, lambda: ran.append("small"))
    graphs.record(LARGE, lambda: ran.append("large"))
    ran.clear()
    assert graphs.launch(LARGE)
    assert graphs.launch(SMALL)
    assert ran == ["large", "small"]


def test_cleared_graphs_are_freed_and_recorded_again(graphs: StepGraphs, recorder: Recorder) -> None:
    graphs.record(SMALL, lambda: None)
    graphs.record(LARGE, lambda: None)
    graphs.clear()
    assert recorder.live == 0
    assert not graphs.launch(SMALL)
    graphs.record(SMALL, lambda: None)
    assert graphs.launch(SMALL)


def test_the_least_recently_used_goes(
    graphs: StepGraphs, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 3)
    for rows in (1, 2, 4):
        graphs.record((rows, 256), lambda: None)
    assert graphs.launch((1, 256))
    graphs.record((8, 256), lambda: None)
    assert (len(graphs), recorder.live) == (3, 3)
    assert [graphs.launch((rows, 256)) for rows in (1, 2, 4, 8)] == [True, False, True, True]


@pytest.mark.parametrize("failure", [DeviceError("cuda: out of graphs"), StepError("TensorRT: not now")])
def test_a_failed_recording_ends_recording_with_one_line(
    graphs: StepGraphs, recorder: Recorder, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    graphs.record(SMALL, lambda: None)
    recorder.failure = failure
    graphs.record(LARGE, lambda: None)
    graphs.record((4, 256), lambda: None)
    assert recorder.asked == 2
    assert recorder.live == 0
    assert not graphs.launch(SMALL)
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"rows=8 window=512: {failure}" in line.getMessage()


def test_a_graph_that_fails_is_not_launched_again(graphs: StepGraphs, recorder: Recorder) -> None:
    graphs.record(SMALL, lambda: None)
    graphs.record(LARGE, lambda: None)
    recorder.failure = DeviceError("cuda: cuGraphLaunch failed")
    with pytest.raises(DeviceError, match="cuGraphLaunch"):
        graphs.launch(SMALL)
    recorder.failure = None
    assert recorder.live == 1
    assert not graphs.launch(SMALL)
    assert graphs.launch(LARGE)


def test_unwanted_graphs_are_not_recorded() -> None:
    graphs = StepGraphs(Stream(), graph_recorder(wanted=False))  # type: ignore[arg-type]
    graphs.record(SMALL, lambda: pytest.fail("recorded"))
    assert not graphs.launch(SMALL)


def test_without_the_bindings_steps_run_by_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    assert graph_recorder(wanted=True) is None
    assert "install the extra gpu-cu13" in caplog.text
