"""The TensorRT engine on the rig: load chain, windows, graphs, threads, page-locked memory, close.

What it shares with every engine is in test_behaviour.py.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engines import open_engine
from engines.contract import Engine, LaneId
from engines.decoder import Decoder
from engines.errors import DeviceError, ReleaseError
from engines.loading import VerifiedRelease, load_release
from engines.manifest import MANIFEST, Golden
from engines.options import EngineOptions
from engines.page_locking import open_page_locker
from engines.publishing import publish_release
from engines.tensorrt_engine import TensorRTEngine
from engines.windows import row_counts, windows
from tests.engines import behaviours
from tests.engines.conftest import Keys, Resign
from tests.gpu.on_host import OnHost
from tests.rig.plugin import Rig
from tests.rig.releases import open_on_rig, rig_release
from tests.waiting import wait_until

LONG = 600  # windows of 256, 512 and 608 positions
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def release(module_rig: Rig, small_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig_release(small_decoder, tmp_path_factory.mktemp("r"), max_seq_len=LONG)


@pytest.fixture
def engine(rig: Rig, release: Path) -> Iterator[Engine]:
    opened = OnHost(open_on_rig(release))
    yield opened
    opened.close()


@pytest.fixture
def verified(release: Path, keys: Keys, tmp_path: Path, resign: Resign) -> Callable[..., VerifiedRelease]:
    """verified(**manifest fields) → the release, signed and through the load chain."""

    def load(**changes: object) -> VerifiedRelease:
        signed = resign(release, **changes)
        version = tmp_path / "repo" / "small" / "1"
        publish_release(signed, version, trust=keys.trust, model="small")
        return load_release(version, model="small", trust=keys.trust)

    return load


def test_a_signed_release_opens_warm_and_answers_its_golden_token(
    rig: Rig, verified: Callable[..., VerifiedRelease]
) -> None:
    steps: list[str] = []
    loaded = verified()

    def run(job: Callable[[], object]) -> object:
        done = job()
        steps.append(str(done))
        return done

    engine = open_engine(loaded, EngineOptions(), run=run)  # type: ignore[arg-type]
    spec = engine.spec
    assert not spec.exact
    assert (spec.lanes, spec.positions, spec.kv_dtype.name) == (4, 608, "float16")
    prefills = [step for step in steps if step.startswith("prefill of")]
    decodes = [step for step in steps if step.startswith("decode of")]
    assert len(decodes) == len(row_counts(4)) * len(windows(608))
    assert {step.split()[2] for step in prefills} == {"1", "128"}
    assert rig.gpu.held.graph_execs == len(decodes), "every decode was recorded"
    golden = loaded.manifest.golden
    logits = engine.prefill(LaneId(1), np.asarray(golden.prompt, np.int64), 0)
    assert (logits.device, logits.stream is None) == ("cuda:0", False)
    assert int(np.argmax(np.asarray(logits.array)[0])) == golden.token
    engine.close()


def test_another_golden_token_is_refused_and_everything_is_given_back(
    rig: Rig, verified: Callable[..., VerifiedRelease]
) -> None:
    loaded, held = verified(golden=Golden(prompt=(1, 2, 3), token=0, margin=1.0)), rig.gpu.held
    with pytest.raises(ReleaseError, match="golden: expected token 0"):
        open_engine(loaded, EngineOptions())
    assert rig.gpu.held == held


def test_a_plan_for_another_gpu_is_refused_before_tensorrt_sees_it(
    rig: Rig, verified: Callable[..., VerifiedRelease]
) -> None:
    loaded = verified()
    rig.trt.fail("deserialize_cuda_engine")
    rig.gpu.plug(capability=(9, 0))
    with pytest.raises(ReleaseError, match=r"compute capability: expected a GPU of 8\.0"):
        open_engine(loaded, EngineOptions())
    rig.gpu.plug(name="Another GPU")
    with pytest.raises(ReleaseError, match="gpu: expected Stand-in GPU"):
        open_engine(loaded, EngineOptions())
    rig.gpu.unplug()
    with pytest.raises(DeviceError, match="expected a GPU, found none"):
        open_engine(loaded, EngineOptions())
    assert rig.trt.after, "TensorRT was asked"
    rig.trt.heal()


def test_too_little_device_memory_is_said_before_it_is_taken(
    rig: Rig, verified: Callable[..., VerifiedRelease]
) -> None:
    loaded = verified()
    rig.gpu.plug(total=2**20)
    taken = rig.gpu.calls("cuMemAlloc")
    with pytest.raises(ReleaseError, match=r"gpu_memory: expected \d+ bytes .*KV \d+.* found 1048576 bytes"):
        open_engine(loaded, EngineOptions())
    assert rig.gpu.calls("cuMemAlloc") == taken


@pytest.mark.parametrize("edge", [255, 256, 257, 511, 512, 513, LONG - 2])
def test_steps_agree_across_the_edges_of_windows(engine: Engine, edge: int) -> None:
    """A prefill that ends, and decodes that begin, on either side of where the window grows."""
    tokens = behaviours.some_tokens(engine, LONG, seed=edge)
    whole = behaviours.prefill(engine, 0, tokens[: edge + 1])
    behaviours.prefill(engine, 1, tokens[: edge - 1])
    behaviours.decode(engine, {1: (int(tokens[edge - 1]), edge - 1)})
    stepped = behaviours.decode(engine, {1: (int(tokens[edge]), edge), 3: (1, 0)})[1]
    assert behaviours.same(engine, stepped, whole)


def test_the_window_follows_the_longest_sequence_in_the_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.tensorrt_step import StepContext

    seen: list[tuple[int, int, int]] = []
    shape = StepContext.shape

    def watched(self: StepContext, rows: int, tokens: int, window: int) -> None:
        seen.append((rows, tokens, window))
        shape(self, rows, tokens, window)

    monkeypatch.setattr(StepContext, "shape", watched)
    behaviours.prefill(engine, 0, behaviours.some_tokens(engine, 300))
    behaviours.decode(engine, {0: (1, 300), 1: (1, 0)})
    behaviours.decode(engine, {1: (1, 1)})
    behaviours.decode(engine, {2: (1, LONG - 1)})
    assert seen == [(1, 128, 256), (1, 128, 256), (1, 44, 512), (2, 1, 512), (2, 1, 256), (4, 1, 608)]


def test_a_thousand_random_steps_change_what_they_write_and_scratch(rig: Rig, release: Path) -> None:
    """Looked at in the pool itself, to the last position before scratch, where no block reaches."""
    engine = OnHost(open_on_rig(release))
    list(engine.prewarm())
    spec, random = engine.spec, np.random.default_rng(11)
    kv = pool_of(engine)
    lengths = [0] * spec.lanes
    for step in range(1000):
        before = kv.copy()
        lengths = [0 if length > spec.max_seq_len - 12 else length for length in lengths]
        if random.random() < 0.2:
            lane, count = int(random.integers(spec.lanes)), int(random.integers(1, 12))
            engine.prefill(LaneId(lane), behaviours.some_tokens(engine, count, seed=step), lengths[lane])
            written = {lane: count}
        else:
            lanes = [int(lane) for lane in random.permutation(spec.lanes)[: random.integers(1, spec.lanes)]]
            behaviours.decode(engine, {lane: (step % 300, lengths[lane]) for lane in lanes})
            written = dict.fromkeys(lanes, 1)
        for lane, count in written.items():
            at = slice(lengths[lane], lengths[lane] + count)
            assert (kv[:, :, lane, :, at] != before[:, :, lane, :, at]).any(), f"step {step} wrote nothing"
            before[:, :, lane, :, at] = kv[:, :, lane, :, at]
            lengths[lane] += count
        before[..., spec.positions - 1, :] = kv[..., spec.positions - 1, :]
        assert np.array_equal(kv, before), f"step {step} wrote elsewhere than {written}"
    engine.close()


def pool_of(engine: OnHost) -> npt.NDArray[np.uint16]:
    """The lanes themselves, [layers, 2, lanes, heads, S, D]: the stand-in's memory is ours to look at."""
    assert isinstance(engine.engine, TensorRTEngine)
    spec, pool = engine.spec, engine.engine._pool
    assert pool is not None
    g = spec.geometry
    shape = (g.layers, 2, spec.lanes, g.kv_heads, spec.positions, g.head_dim)
    raw = (ctypes.c_uint16 * int(np.prod(shape))).from_address(pool.address(0, 0, 0))
    return np.frombuffer(raw, np.uint16).reshape(shape)


def test_a_recorded_decode_answers_as_the_plain_one(rig: Rig, release: Path) -> None:
    with_graphs, plain = OnHost(open_on_rig(release)), OnHost(open_on_rig(release, cuda_graphs=False))
    random = np.random.default_rng(3)
    for engine in (with_graphs, plain):
        assert list(engine.prewarm())
        for lane in range(4):
            behaviours.prefill(engine, lane, behaviours.some_tokens(engine, 100, seed=lane))
    launched = rig.gpu.graph_launches
    for step in range(20):
        lanes = random.permutation(4)[: random.integers(1, 5)]
        rows = {int(lane): (int(random.integers(1, 300)), 100 + step) for lane in lanes}
        answers = [behaviours.decode(engine, rows) for engine in (with_graphs, plain)]
        assert all(np.array_equal(answers[0][lane], answers[1][lane]) for lane in rows)
    assert rig.gpu.graph_launches - launched == 20
    with_graphs.close()
    plain.close()


def test_a_recording_that_fails_leaves_steps_without_graphs(
    rig: Rig, release: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = OnHost(open_on_rig(release))
    rig.gpu.fail("cuGraphInstantiate")
    behaviours.decode_equals_prefill(engine)
    assert "without CUDA graphs" in caplog.text
    assert rig.gpu.held.graphs == rig.gpu.held.graph_execs == 0
    engine.close()


def test_an_engine_works_on_any_thread_one_at_a_time(rig: Rig, release: Path) -> None:
    """Opened on one thread, stepped on a second, closed on a third: as a swap does."""
    opened: list[Engine] = []
    errors: list[BaseException] = []

    def on_a_thread(job: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                job()
                assert rig.gpu.context_depth == 0
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()

    on_a_thread(lambda: opened.append(OnHost(open_on_rig(release))))
    on_a_thread(lambda: list(opened[0].prewarm()))
    on_a_thread(lambda: behaviours.decode_equals_prefill(opened[0]))
    on_a_thread(lambda: behaviours.blocks_round_trip(opened[0]))
    on_a_thread(lambda: opened[0].close())
    assert errors == []


def test_another_engine_opens_while_one_steps(rig: Rig, release: Path) -> None:
    """Each on its own thread, recording graphs meanwhile: neither disturbs the other."""
    serving = OnHost(open_on_rig(release))
    list(serving.prewarm())
    stop, errors = threading.Event(), []

    def step() -> None:
        try:
            position = 0
            while not stop.is_set():
                behaviours.decode(serving, {0: (1, position % LONG), 2: (2, position % LONG)})
                position += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        for _ in range(3):
            candidate = OnHost(open_on_rig(release))
            behaviours.decode_equals_prefill(candidate)
            candidate.close()
    finally:
        stop.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert errors == []
    serving.close()


def test_page_locked_blocks_are_copied_without_a_detour(rig: Rig, engine: Engine) -> None:
    blocks = behaviours.whole_blocks(engine)
    size = -(-engine.spec.block_nbytes // 4096) * 4096
    arena = np.zeros((blocks, size), np.uint8)
    payloads = [slot[: engine.spec.block_nbytes] for slot in arena]
    behaviours.prefill(engine, 0, behaviours.some_tokens(engine, LONG))
    engine.export_blocks(LaneId(0), range(blocks), payloads)
    slow = rig.gpu.pageable_copies
    assert slow > 0
    locker = open_page_locker("tensorrt", device=0)
    locker.lock(arena)
    wait_until(lambda: rig.gpu.held.registered_bytes == arena.nbytes)
    engine.import_blocks(LaneId(1), range(blocks), payloads)
    assert rig.gpu.pageable_copies == slow
    assert np.array_equal(behaviours.export(engine, 1, range(blocks)), np.stack(payloads))
    locker.unlock(arena)
    assert rig.gpu.held.registered_bytes == 0
    locker.close()


def test_close_gives_everything_back_twice(rig: Rig, release: Path) -> None:
    held = rig.gpu.held
    engine = open_on_rig(release)
    list(engine.prewarm())
    assert rig.gpu.held.device_bytes > held.device_bytes
    engine.close()
    assert rig.gpu.held == held
    engine.close()


def test_the_release_holds_the_plan_its_report_and_the_tokenizer(release: Path) -> None:
    assert {path.name for path in release.iterdir()} == {
        MANIFEST,
        "layers.json",
        "model.plan",
        "tokenizer.json",
    }
