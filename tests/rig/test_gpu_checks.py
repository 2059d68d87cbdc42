"""What `make test-gpu` checks on a GPU node, in small and without one; and that broken engines fail it.

Three kinds of engine stand in: the CPU engine (exact, float32), TensorRT's graph run by ONNX Runtime, and,
where the rig can be built, the TensorRT engine over a stand-in driver and a tensorrt double.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from engines.build import BuildOptions, build_release
from engines.contract import Engine
from engines.cuda import open_device
from engines.decoder import Decoder
from engines.device_pool import DevicePool
from engines.errors import ReleaseError
from engines.graph_tensorrt import build_graph
from engines.onnx_emit import EmittedGraph
from engines.options import EngineOptions
from tests.conftest import open_release
from tests.engines import graph_changes
from tests.engines.random_decoder import VOCAB
from tests.engines.test_reference import ignored_cache, insert, upper_left_mask
from tests.gpu import checks
from tests.gpu.torch_reference import Precision, Reference, errors, reference
from tests.rig import mutant_engines as mutants
from tests.rig.graph_engine import POSITIONS, GraphEngine
from tests.rig.plugin import Rig
from tests.rig.rig_engine import RigModel, copying_stream

Change = Callable[[EmittedGraph], EmittedGraph]

SUBJECTS = ("cpu-float32", "graph-float16", "rig-float16", "rig-bfloat16")


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
def references(small_decoder: Decoder) -> dict[str, Reference]:
    """All made before the rig is plugged in: torch looks for a tensorrt of its own."""
    tokens = np.random.default_rng(1).integers(1, VOCAB, POSITIONS - 1)
    precisions: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
    return {precision: reference(small_decoder, tokens, precision) for precision in precisions}


class Subject:
    """An engine, how to open others like it, and what its logits may differ by."""

    def __init__(
        self,
        expected: Reference,
        *,
        open_: Callable[[], Engine],
        open_plain: Callable[[], Engine] | None = None,
        load: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.expected = expected
        self.engine, self.plain = open_(), (open_plain or open_)()
        self.limit = 0.0 if self.engine.spec.exact else expected.limit
        self._load = load

    def check(self, number: str, engine: Engine) -> str:
        limit = self.limit
        match number:
            case "1":
                return checks.logits_match_torch(engine, self.expected)
            case "2":
                return checks.split_equals_whole(engine, limit=limit)
            case "3":
                return checks.idle_lanes_keep_their_bytes(engine, steps=60)
            case "4":
                return checks.lane_slice_equals_batch_row(engine, limit=limit)
            case "5":
                return checks.blocks_round_trip(engine, load=self._load(), limit=limit)
            case _:
                return checks.graphs_change_nothing(engine, self.plain, limit=limit)

    def close(self) -> None:
        self.engine.close()
        self.plain.close()


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, references: dict[str, Reference], small_decoder: Decoder,
    open_cpu: Callable[[], Engine],
) -> Iterator[Subject]:  # fmt: skip
    kind, _, precision = request.param.partition("-")
    expected = references[precision]
    if kind == "cpu":
        made = Subject(expected, open_=open_cpu)
    elif kind == "graph":
        made = Subject(expected, open_=partial(GraphEngine, small_decoder))
    else:
        request.getfixturevalue("module_rig")
        model = RigModel(small_decoder, precision)  # type: ignore[arg-type]
        plain = partial(model.open, cuda_graphs=False)
        made = Subject(expected, open_=model.open, open_plain=plain, load=copying_stream)
    yield made
    made.close()


@pytest.mark.parametrize("number", ["1", "2", "3", "4", "5", "6"])
def test_a_right_engine_passes(subject: Subject, number: str) -> None:
    assert subject.check(number, subject.engine)


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
        ("6", mutants.StaleGraph, "visit"),
    ],
)
def test_a_broken_engine_fails(
    subject: Subject, number: str, mutant: Callable[[Engine], Engine], complaint: str | None
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        subject.check(number, mutant(subject.engine))


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


def values_read_as_zeros(graph: EmittedGraph) -> EmittedGraph:
    """The cache of layer 1 is written as it should be, and never read."""
    nodes = [helper.make_node("Sub", ["present_value_1", "present_value_1"], ["mutant.zeros"])]
    return insert(graph, reader="value_1.window", tensor="present_value_1", nodes=nodes)


WRONG_GRAPHS: list[Change] = [
    upper_left_mask,
    values_read_as_zeros,
    one_position_too_many,
    own_position_unseen,
]


@pytest.mark.parametrize("change", WRONG_GRAPHS)
def test_a_wrong_graph_in_half_precision_fails(
    small_decoder: Decoder, references: dict[str, Reference], change: Change
) -> None:
    with pytest.raises(AssertionError, match="T = 1 after"):
        checks.logits_match_torch(GraphEngine(small_decoder, change=change), references["float16"])


@pytest.mark.parametrize("change", WRONG_GRAPHS)
def test_a_wrong_plan_fails(
    references: dict[str, Reference], module_rig: Rig, small_decoder: Decoder, change: Change
) -> None:
    graph = change(build_graph(small_decoder, positions=POSITIONS, precision="float16"))
    engine = RigModel(small_decoder, "float16", graph=graph).open()
    try:
        with pytest.raises(AssertionError, match="T = 1 after"):
            checks.logits_match_torch(engine, references["float16"])
    finally:
        engine.close()


def test_a_plan_that_writes_its_cache_elsewhere_is_not_even_opened(
    module_rig: Rig, small_decoder: Decoder
) -> None:
    graph = ignored_cache(build_graph(small_decoder, positions=POSITIONS, precision="float16"))
    with pytest.raises(ReleaseError, match="output present_value_1 in the memory of past_value_1"):
        RigModel(small_decoder, "float16", graph=graph).open()


def on_another_stream(pool: DevicePool, *arguments: object) -> None:
    """An export that waits for its own copies, and not for the step before them."""
    device = open_device(0)
    stream = device.stream()
    EXPORT(pool, stream, *arguments[1:])  # type: ignore[arg-type]
    stream.close()


EXPORT = DevicePool.export_blocks


def test_an_export_out_of_order_with_steps_fails(
    module_rig: Rig, small_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RigModel(small_decoder, "float16").open()
    monkeypatch.setattr(DevicePool, "export_blocks", on_another_stream)
    try:
        with pytest.raises(AssertionError):
            checks.blocks_round_trip(engine, load=nullcontext(), limit=1.0)
    finally:
        engine.close()


@pytest.mark.parametrize("change", [graph_changes.upper_left_mask, graph_changes.ignored_cache])
def test_a_wrong_graph_on_the_cpu_engine_fails(
    release: Path, references: dict[str, Reference], change: Callable[[onnx.GraphProto], None]
) -> None:
    engine = graph_changes.changed_engine(release, change)
    with pytest.raises(AssertionError, match="T = 1 after"):
        checks.logits_match_torch(engine, references["float32"])
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


def test_ten_swaps_of_plans_leave_the_device_as_it_was(module_rig: Rig, small_decoder: Decoder) -> None:
    """Two releases in turn, each twice: the second of a kind takes the live lanes over."""
    models = [RigModel(small_decoder, precision) for precision in ("float16", "bfloat16")]  # type: ignore[arg-type]

    def open_next(number: int, serving: Engine | None) -> Engine:
        return models[number // 2 % 2].open(beside=None if serving is None else serving.spec)

    def held() -> dict[str, int]:
        now = module_rig.gpu.held
        return {"device": now.device_bytes, "page-locked": now.page_locked_bytes, "streams": now.streams}

    before, slack = held(), dict.fromkeys(held(), 0)
    said = checks.swaps_leave_memory_flat(open_next, held, slack=slack, limit=0.1)
    assert said.startswith("10 swaps, 5 with live lanes")
    assert held() == before
