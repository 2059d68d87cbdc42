"""One TensorRT engine follows another on the rig, and takes its lanes over where they are the same."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.contract import Engine, shares_kv
from engines.decoder import Decoder
from engines.errors import EngineError
from tests.engines import behaviours
from tests.engines.random_decoder import random_decoder
from tests.gpu.on_host import OnHost
from tests.rig.plugin import Rig
from tests.rig.releases import open_on_rig, rig_release

LANES, LENGTH = 4, 240


@pytest.fixture(scope="module")
def releases(module_rig: Rig, small_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the same weights and one of others."""
    folder = tmp_path_factory.mktemp("r")
    same = [rig_release(small_decoder, folder, release=number) for number in (1, 2)]
    return [*same, rig_release(random_decoder(seed=2), folder, release=3)]


@pytest.fixture
def serving(rig: Rig, releases: list[Path]) -> Iterator[Engine]:
    """An engine with a sequence of 50 tokens in each lane."""
    engine = warm(releases[0])
    for lane in range(LANES):
        behaviours.prefill(engine, lane, behaviours.some_tokens(engine, 50, seed=lane))
    yield engine
    engine.close()


def warm(release: Path, *, beside: Engine | None = None) -> OnHost:
    engine = OnHost(open_on_rig(release, beside=None if beside is None else beside.spec))
    assert list(engine.prewarm())
    return engine


def pool_bytes(engine: Engine) -> int:
    g = engine.spec.geometry
    per_lane = 2 * g.layers * g.kv_heads * engine.spec.positions * g.head_dim * 2
    return LANES * per_lane


def rows(step: int) -> dict[int, tuple[int, int]]:
    return {lane: (step * 7 + lane + 1, 50 + step) for lane in range(LANES)}


def test_live_sequences_go_on_as_if_nothing_had_happened(
    rig: Rig, serving: Engine, releases: list[Path]
) -> None:
    kept = {lane: behaviours.export(serving, lane, range(3)) for lane in range(LANES)}
    expected = [behaviours.decode(serving, rows(step)) for step in range(10)]
    for step in range(5):
        behaviours.decode(serving, rows(step))
    engine: Engine = serving
    for number in (1, 0, 1):  # there, back, and there again
        successor = warm(releases[number], beside=engine)
        assert shares_kv(successor.spec, engine.spec)
        successor.adopt_kv(engine)
        engine.close()
        engine = successor
        for step in range(5, 10):
            found = behaviours.decode(engine, rows(step))
            assert all(np.array_equal(found[lane], expected[step][lane]) for lane in range(LANES)), step
        assert all(np.array_equal(behaviours.export(engine, ln, range(3)), kept[ln]) for ln in range(LANES))
    engine.close()


def test_no_second_pool_is_ever_taken(rig: Rig, serving: Engine, releases: list[Path]) -> None:
    alone = rig.gpu.held
    rig.gpu.restart_peak()
    successor = warm(releases[1], beside=serving)
    beside = rig.gpu.held.device_bytes - alone.device_bytes
    pool = pool_bytes(serving)
    lane, layer = pool // LANES, pool // 4  # what a warm-up needs: one lane, and one layer's keys of all
    assert beside == alone.device_bytes - pool + lane + layer
    successor.adopt_kv(serving)
    serving.close()
    assert rig.gpu.peak_bytes <= alone.device_bytes + beside
    assert rig.gpu.held.device_bytes == alone.device_bytes
    assert rig.gpu.held.page_locked_bytes == alone.page_locked_bytes
    behaviours.decode_equals_prefill(successor)
    successor.close()


def test_lanes_before_the_swap_are_untouched_by_the_warm_up(
    rig: Rig, serving: Engine, releases: list[Path]
) -> None:
    blocks = range(behaviours.whole_blocks(serving))
    before = [behaviours.export(serving, lane, blocks) for lane in range(LANES)]
    for release in releases[1:]:
        candidate = warm(release, beside=serving)
        assert all(np.array_equal(behaviours.export(serving, ln, blocks), before[ln]) for ln in range(LANES))
        candidate.close()


def test_an_engine_of_other_weights_has_its_own_lanes(
    rig: Rig, serving: Engine, releases: list[Path]
) -> None:
    before = rig.gpu.held.device_bytes
    other = warm(releases[2], beside=serving)
    assert not shares_kv(other.spec, serving.spec)
    assert rig.gpu.held.device_bytes - before == before
    expected = behaviours.decode(serving, rows(0))
    behaviours.batch_equals_lone(other)
    found = behaviours.decode(serving, rows(0))
    assert all(np.array_equal(found[lane], expected[lane]) for lane in range(LANES))
    with pytest.raises(AssertionError, match="another identity or layout"):
        other.adopt_kv(serving)
    other.close()


def test_a_candidate_that_fails_leaves_the_serving_engine_alone(
    rig: Rig, serving: Engine, releases: list[Path]
) -> None:
    before = rig.gpu.calls("cuMemAlloc")
    warm(releases[1], beside=serving).close()
    allocations = rig.gpu.calls("cuMemAlloc") - before
    expected, held = behaviours.decode(serving, rows(0)), rig.gpu.held
    for nth in range(1, allocations + 1):
        rig.gpu.fail("cuMemAlloc", nth=nth, times=2)  # pycuda tries twice, TensorRT once
        with pytest.raises(EngineError):
            warm(releases[1], beside=serving)
        rig.gpu.forget_failures()
        assert rig.gpu.held == held, f"allocation {nth} of {allocations}"
        found = behaviours.decode(serving, rows(0))
        assert all(np.array_equal(found[lane], expected[lane]) for lane in range(LANES))


def test_blocks_of_one_engine_are_blocks_of_the_other(
    rig: Rig, serving: Engine, releases: list[Path]
) -> None:
    other = OnHost(open_on_rig(releases[1]))
    behaviours.resumed_equals_computed(serving, other)
    other.close()
