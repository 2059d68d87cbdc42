"""What `make test-gpu` checks on a GPU node, in small and without one; and that broken engines fail it."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from engines.build import BuildOptions, build_release
from engines.contract import Engine
from engines.decoder import Decoder
from engines.onnx_emit import EmittedGraph
from engines.options import EngineOptions
from tests.conftest import open_release
from tests.engines import graph_changes
from tests.engines.random_decoder import VOCAB
from tests.engines.test_reference import ignored_cache, insert, upper_left_mask
from tests.gpu import checks
from tests.gpu.torch_reference import Reference, errors, reference
from tests.rig import mutant_engines as mutants
from tests.rig.graph_engine import POSITIONS, GraphEngine

Check = Callable[[Engine], str]
SUBJECTS = ("cpu-float32", "graph-float16")


@pytest.fixture(scope="module")
def release(small_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random decoder in fp32, whose lanes are full but for one scratch position."""
    options = BuildOptions(precision="fp32", lanes=4, max_seq_len=POSITIONS - 1, max_prefill_tokens=128)
    return build_release(
        small_decoder, tmp_path_factory.mktemp("r"), model="small", release=1, options=options
    )


@pytest.fixture(scope="module")
def open_cpu(release: Path) -> Callable[[], Engine]:
    return partial(open_release, release, EngineOptions(threads=2))


@pytest.fixture(scope="module")
def references(small_decoder: Decoder) -> Callable[[str], Reference]:
    tokens = np.random.default_rng(1).integers(1, VOCAB, POSITIONS - 1)
    made: dict[str, Reference] = {}

    def of(precision: str) -> Reference:
        if precision not in made:
            made[precision] = reference(small_decoder, tokens, precision)  # type: ignore[arg-type]
        return made[precision]

    return of


class Subject:
    """An engine, how to open another like it, and what its logits may differ by."""

    def __init__(self, open_: Callable[[], Engine], expected: Reference) -> None:
        self.open, self.expected = open_, expected
        self.engine = open_()
        self.limit = 0.0 if self.engine.spec.exact else expected.limit

    def checks(self) -> dict[str, Check]:
        limit = self.limit
        return {
            "1": lambda engine: checks.logits_match_torch(engine, self.expected),
            "2": lambda engine: checks.split_equals_whole(engine, limit=limit),
            "3": lambda engine: checks.idle_lanes_keep_their_bytes(engine, steps=60),
            "4": lambda engine: checks.lane_slice_equals_batch_row(engine, limit=limit),
            "5": lambda engine: checks.blocks_round_trip(engine, load=nullcontext(), limit=limit),
            "6": lambda engine: checks.graphs_change_nothing(engine, self.open(), limit=limit),
        }


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, open_cpu: Callable[[], Engine], small_decoder: Decoder,
    references: Callable[[str], Reference],
) -> Iterator[Subject]:  # fmt: skip
    kind, _, precision = request.param.partition("-")
    made = Subject(open_cpu if kind == "cpu" else partial(GraphEngine, small_decoder), references(precision))
    yield made
    made.engine.close()


@pytest.mark.parametrize("number", ["1", "2", "3", "4", "5", "6"])
def test_a_right_engine_passes(subject: Subject, number: str) -> None:
    assert subject.checks()[number](subject.engine)


@pytest.mark.parametrize(
    ("number", "mutant", "complaint"),
    [
        ("2", mutants.SplitBlind, "logits for parts"),
        ("3", mutants.WritesIdleLane, "changed idle lane"),
        ("4", mutants.WrongSlice, "KV of lane"),
        ("4", mutants.SwappedRows, "row"),
        ("5", mutants.ImportsOneLate, None),
        ("5", mutants.ImportsNextBlock, None),
        ("5", mutants.ExportsEarly, "did not wait"),
        ("6", mutants.StaleGraph, "step"),
    ],
)
def test_a_broken_engine_fails(
    subject: Subject, number: str, mutant: Callable[[Engine], Engine], complaint: str | None
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        subject.checks()[number](mutant(subject.engine))


# -- wrong graphs --


def one_position_too_many(graph: EmittedGraph) -> EmittedGraph:
    """Every query sees the position after its own."""
    one = numpy_helper.from_array(np.array(1, np.int64), "mutant.one")
    nodes = [
        helper.make_node("Constant", [], ["mutant.one"], value=one),
        helper.make_node("Add", ["position_ids", "mutant.one"], ["mutant.positions"]),
    ]
    return insert(graph, reader="queries.4d", tensor="position_ids", nodes=nodes)


def own_position_unseen(graph: EmittedGraph) -> EmittedGraph:
    """A query sees what came before it and not itself, but for the first."""
    one = numpy_helper.from_array(np.array(1, np.int64), "mutant.one")
    nodes = [
        helper.make_node("Constant", [], ["mutant.one"], value=one),
        helper.make_node("Sub", ["position_ids", "mutant.one"], ["mutant.before"]),
        helper.make_node("Abs", ["mutant.before"], ["mutant.positions"]),
    ]
    return insert(graph, reader="queries.4d", tensor="position_ids", nodes=nodes)


@pytest.mark.parametrize(
    "change", [upper_left_mask, ignored_cache, one_position_too_many, own_position_unseen]
)
def test_a_wrong_graph_in_half_precision_fails(
    small_decoder: Decoder, references: Callable[[str], Reference],
    change: Callable[[EmittedGraph], EmittedGraph],
) -> None:  # fmt: skip
    with pytest.raises(AssertionError, match="T = 1 after"):
        checks.logits_match_torch(GraphEngine(small_decoder, change=change), references("float16"))


@pytest.mark.parametrize("change", [graph_changes.upper_left_mask, graph_changes.ignored_cache])
def test_a_wrong_graph_on_the_cpu_engine_fails(
    release: Path, references: Callable[[str], Reference], change: Callable[[onnx.GraphProto], None]
) -> None:
    engine = graph_changes.changed_engine(release, change)
    with pytest.raises(AssertionError, match="T = 1 after"):
        checks.logits_match_torch(engine, references("float32"))
    engine.close()


def test_idle_rows_that_write_at_zero_fail(small_decoder: Decoder) -> None:
    engine = GraphEngine(small_decoder)
    engine.run.idle_write = 0
    with pytest.raises(AssertionError, match="changed idle lane"):
        checks.idle_lanes_keep_their_bytes(engine, steps=60)


def test_an_error_that_is_not_a_number_is_beyond_every_limit() -> None:
    exact = np.ones((2, 8))
    broken = exact.copy()
    broken[1, 3] = np.nan
    found = errors(broken, exact)
    assert found[0] == 0
    assert not found[1] <= 1e9


# -- swaps --


class Memory:
    """Counts the engines that are open, as if each took a megabyte of the device."""

    def __init__(
        self, open_: Callable[[], Engine], mutant: Callable[[Engine], Engine], *, leaks: bool
    ) -> None:
        self._open, self._mutant, self._leaks = open_, mutant, leaks
        self.opened = self.closed = 0

    def open_next(self, number: int, serving: Engine | None) -> Engine:
        engine = self._mutant(self._open())
        self.opened += 1
        close = engine.close

        def counted() -> None:
            close()
            self.closed += 1

        engine.close = counted  # type: ignore[method-assign]
        return engine

    def __call__(self) -> dict[str, int]:
        return {"device": (self.opened - (0 if self._leaks else self.closed)) << 20}


def swaps(open_: Callable[[], Engine], mutant: Callable[[Engine], Engine], *, leaks: bool = False) -> str:
    memory = Memory(open_, mutant, leaks=leaks)
    slack = {"device": 0}
    said = checks.swaps_leave_memory_flat(memory.open_next, memory, slack=slack, limit=0.0)
    assert memory.opened == memory.closed == 11
    return said


def test_ten_swaps_keep_memory_flat_and_the_sequence_alive(open_cpu: Callable[[], Engine]) -> None:
    assert swaps(open_cpu, mutants.OnHost).startswith("10 swaps, 10 with live lanes")


def test_memory_that_grows_with_every_swap_fails(open_cpu: Callable[[], Engine]) -> None:
    with pytest.raises(AssertionError, match="device memory grew by 6291456 bytes"):
        swaps(open_cpu, mutants.OnHost, leaks=True)


def test_a_swap_that_loses_the_live_lanes_fails(open_cpu: Callable[[], Engine]) -> None:
    with pytest.raises(AssertionError, match="the live sequence after swap 1"):
        swaps(open_cpu, mutants.LosesLanes)
