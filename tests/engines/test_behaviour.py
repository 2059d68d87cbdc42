"""Every engine in SUBJECTS keeps every promise of the Engine protocol; mutants are caught breaking them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.build import BuildOptions, build_release
from engines.contract import Engine, LaneId
from engines.errors import StepError
from engines.kernel_class import exact_here
from engines.options import EngineOptions
from tests.conftest import OpenEngine, open_release
from tests.engines import behaviours, graph_changes
from tests.engines.random_decoder import VOCAB, random_decoder
from tests.gpu.on_host import OnHost
from tests.rig.releases import open_on_rig

CHECKS: dict[str, Callable[[Engine], None]] = {
    "split prefill equals whole": behaviours.split_prefill_equals_whole,
    "decode equals prefill": behaviours.decode_equals_prefill,
    "batch equals lone": behaviours.batch_equals_lone,
    "poison is not read": behaviours.poison_is_not_read,
    "lane is reused": behaviours.lane_is_reused,
    "blocks round trip": behaviours.blocks_round_trip,
    "resumed equals computed": behaviours.resumed_equals_computed,
    "last position is usable": behaviours.last_position_is_usable,
    "out of range asserts": behaviours.out_of_range_asserts,
}

# A later engine joins by a name here and a branch in `subject`; it must give 4 lanes of 240 positions.
ON_CPU = ("int8", "int4", "fp32", "int8-every-feature", "fp32-every-feature")
ON_GPU = ("tensorrt:float16", "tensorrt:bfloat16", "tensorrt:int4", "tensorrt:float16-every-feature")


@pytest.fixture(scope="module", params=(*ON_CPU, *ON_GPU))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target, _, rest = request.param.rpartition(":")
    precision, _, features = rest.partition("-")
    decoder = random_decoder()
    if features:
        decoder = random_decoder(
            tied=False,
            qkv_bias=True,
            o_bias=True,
            qk_norm=True,
            kv_heads=1,
            attention_factor=1.2,
            layers=3,
            ffn=224,
        )
    options = BuildOptions(
        target=target or "onnxruntime",
        precision=precision,
        lanes=4,
        max_seq_len=240,
        block_tokens=16,
        max_prefill_tokens=128,
    )
    if target:
        request.getfixturevalue("module_rig")
    folder = build_release(decoder, tmp_path_factory.mktemp("r"), model="small", release=1, options=options)
    engine = OnHost(open_on_rig(folder)) if target else open_release(folder, EngineOptions(threads=2))
    assert engine.spec.exact == (not target and exact_here(precision))
    yield engine
    engine.close()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_engine_keeps(check: Callable[[Engine], None], subject: Engine) -> None:
    check(subject)


def test_idle_lanes_stay_over_a_thousand_random_steps(subject: Engine) -> None:
    behaviours.idle_lanes_stay(subject, steps=1000 if subject.spec.geometry.layers == 2 else 100)


@pytest.mark.parametrize(
    ("mutant", "caught_by"),
    [
        (graph_changes.upper_left_mask, behaviours.split_prefill_equals_whole),
        (graph_changes.upper_left_mask, behaviours.decode_equals_prefill),
        (graph_changes.ignored_cache, behaviours.decode_equals_prefill),
        (graph_changes.ignored_cache, behaviours.resumed_equals_computed),
        (graph_changes.idle_rows_write_at_zero, lambda engine: behaviours.idle_lanes_stay(engine, steps=30)),
        (graph_changes.queries_not_doubled, behaviours.split_prefill_equals_whole),
        (graph_changes.queries_not_doubled, behaviours.decode_equals_prefill),
    ],
)
def test_mutants_are_caught(
    mutant: graph_changes.Change, caught_by: Callable[[Engine], None], mutants_release: Path
) -> None:
    healthy = graph_changes.changed_engine(mutants_release, lambda graph: None)
    caught_by(healthy)
    healthy.close()
    broken = graph_changes.changed_engine(mutants_release, mutant)
    with pytest.raises(AssertionError):
        caught_by(broken)
    broken.close()


@pytest.fixture(scope="module")
def mutants_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In fp32, where no rounding of activations can hide a difference."""
    options = BuildOptions(
        precision="fp32", lanes=4, max_seq_len=240, block_tokens=16, max_prefill_tokens=240
    )
    folder = tmp_path_factory.mktemp("mutants")
    return build_release(random_decoder(), folder, model="small", release=1, options=options)


def test_bits_do_not_depend_on_lanes_threads_or_room(engine: OpenEngine) -> None:
    big, small = engine(lanes=4, threads=2), engine(lanes=2, threads=1, max_seq_len=120)
    tokens = behaviours.some_tokens(big, 100)
    assert np.array_equal(behaviours.prefill(big, 3, tokens), behaviours.prefill(small, 1, tokens, cuts=[33]))
    assert np.array_equal(behaviours.cached(big, 3, 100), behaviours.cached(small, 1, 100))
    behaviours.resumed_equals_computed(big, small)


def test_a_failed_step_raises_and_the_next_one_works(small_release: Path) -> None:
    bad = VOCAB - 1
    engine = graph_changes.changed_engine(small_release, graph_changes.fails_on(bad))
    good = np.arange(1, 9)
    before = engine.prefill(LaneId(0), good, 0).array.copy()
    with pytest.raises(StepError, match="onnxruntime"):
        engine.prefill(LaneId(1), np.array([1, 2, bad]), 0)
    with pytest.raises(StepError):
        engine.decode([LaneId(0), LaneId(1)], np.array([1, bad]), np.array([8, 0]))
    assert np.array_equal(engine.prefill(LaneId(2), good, 0).array, before)
    engine.close()
