"""The CPU engine: what it refuses to open, what it says of itself, the demo model's bits and answers."""

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from engines.build import BuildOptions, build_release
from engines.contract import Engine, LaneId
from engines.errors import ReleaseError
from engines.manifest import MANIFEST, EngineManifest, parse_manifest
from engines.options import EngineOptions
from engines.ort import OrtEngine, cache_positions
from tests.conftest import OpenEngine, open_release
from tests.engines import behaviours, graph_changes
from tests.engines.random_decoder import random_decoder

QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


def read(release: Path) -> tuple[EngineManifest, dict[str, memoryview]]:
    manifest = parse_manifest((release / MANIFEST).read_bytes())
    return manifest, {name: memoryview((release / name).read_bytes()) for name in manifest.files}


def test_spec_says_what_was_built(small_release: Path, engine: OpenEngine) -> None:
    manifest, _ = read(small_release)
    spec = engine().spec
    assert (spec.model, spec.release, spec.digest) == ("small", 1, small_release.name)
    assert spec.kv_identity.hex() == manifest.kv_identity
    assert (spec.lanes, spec.max_seq_len, spec.positions, spec.block_tokens) == (4, 250, 256, 16)
    assert spec.block_shape == (2, 2, 2, 16, 32)
    assert spec.block_nbytes == 2 * 2 * 2 * 16 * 32 * 4


@pytest.mark.parametrize(("max_seq_len", "positions"), [(31, 32), (32, 64), (33, 64), (4096, 4128)])
def test_a_lane_has_at_least_one_scratch_position(max_seq_len: int, positions: int) -> None:
    assert cache_positions(max_seq_len, 32) == positions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (EngineOptions(lanes=0), "options: expected lanes of at least 1, found 0"),
        (EngineOptions(max_seq_len=251), "options: expected max_seq_len in 2 … 250, found 251"),
        (EngineOptions(max_seq_len=1), "options: expected max_seq_len in 2 … 250, found 1"),
        (EngineOptions(threads=-1), "options: expected threads of at least 0, found -1"),
    ],
)
def test_options_beyond_the_release_are_refused(
    options: EngineOptions, said: str, small_release: Path
) -> None:
    with pytest.raises(ReleaseError, match=said):
        open_release(small_release, options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            graph_changes.renamed_input,
            r"contract: expected input write_index none, found tensor\(int64\) \[B\]",
        ),
        (
            graph_changes.wider_cache,
            r"contract: expected input past_key_1 tensor\(float\) \[B, 2, S, 32\], found .*\[B, 3, S, 32\]",
        ),
    ],
)
def test_a_graph_of_another_contract_is_refused(
    change: graph_changes.Change, said: str, small_release: Path
) -> None:
    with pytest.raises(ReleaseError, match=said) as refused:
        graph_changes.changed_engine(small_release, change)
    assert refused.value.step == "contract"


def test_a_manifest_of_another_geometry_is_refused(small_release: Path) -> None:
    manifest, files = read(small_release)
    geometry = msgspec.structs.replace(manifest.geometry, vocab_size=321)
    changed = msgspec.structs.replace(manifest, geometry=geometry)
    with pytest.raises(ReleaseError, match=r"contract: expected output logits .*321\], found .*320\]"):
        OrtEngine(changed, files, options=EngineOptions(), digest="d")


def test_bytes_that_are_no_graph_are_refused(small_release: Path) -> None:
    manifest, files = read(small_release)
    files[manifest.graph] = memoryview(b"not a graph")
    with pytest.raises(ReleaseError, match="deserialise: expected a graph that onnxruntime"):
        OrtEngine(manifest, files, options=EngineOptions(), digest="d")


def test_the_engine_keeps_no_hold_on_the_files(small_release: Path) -> None:
    manifest, files = read(small_release)
    buffers = {name: bytearray(data) for name, data in files.items()}
    engine = OrtEngine(
        manifest,
        {name: memoryview(data) for name, data in buffers.items()},
        options=EngineOptions(),
        digest="d",
    )
    tokens = behaviours.some_tokens(engine, 20)
    before = behaviours.prefill(engine, 0, tokens)
    for data in buffers.values():
        data[:] = bytes(len(data))
    assert np.array_equal(behaviours.prefill(engine, 1, tokens), before)
    engine.close()


def test_kv_of_another_kernel_class_is_kept_apart(
    small_release: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, files = read(small_release)
    elsewhere = msgspec.structs.replace(manifest, kernel_class="x86_64 of another kind")
    with caplog.at_level(logging.WARNING):
        engine = OrtEngine(elsewhere, files, options=EngineOptions(lanes=1), digest="d")
    assert engine.spec.kv_identity.hex() != manifest.kv_identity
    assert len(engine.spec.kv_identity) == 16
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "x86_64 of another kind" in caplog.text
    engine.close()


def test_close_is_idempotent_and_final(engine: OpenEngine) -> None:
    one = engine(fresh=True, lanes=1)
    one.close()
    one.close()
    assert behaviours.refuses(lambda: one.prefill(LaneId(0), np.array([1, 2]), 0))
    assert behaviours.refuses(lambda: one.decode([LaneId(0)], np.array([1]), np.array([0])))


def test_prewarm_leaves_a_usable_engine(engine: OpenEngine) -> None:
    one = engine(fresh=True)
    shapes = list(one.prewarm())
    assert len(set(shapes)) == len(shapes) >= one.spec.lanes + 2
    behaviours.decode_equals_prefill(one)


def test_prewarm_holds_up_the_steps_of_another_engine_no_longer_than_it_must(small_release: Path) -> None:
    """Each piece is one wait of the streams that run beside it."""
    manifest, files = read(small_release)
    one = OrtEngine(manifest, files, options=EngineOptions(lanes=1, max_prefill_tokens=128), digest="0")
    assert next(one.prewarm()) == "prefill of 64"
    assert one.spec.max_prefill_tokens == 128
    short = OrtEngine(manifest, files, options=EngineOptions(lanes=1, max_prefill_tokens=8), digest="0")
    assert next(short.prewarm()) == "prefill of 8"


def test_a_successor_goes_on_with_the_lanes_as_they_are(engine: OpenEngine) -> None:
    old, new, alone = (engine(fresh=True) for _ in range(3))
    tokens = behaviours.some_tokens(old, 12)
    expected = behaviours.prefill(alone, 1, tokens)
    behaviours.prefill(old, 1, tokens[:7])
    list(new.prewarm())
    new.adopt_kv(old)
    assert behaviours.refuses(lambda: old.prefill(LaneId(0), np.array([1, 2]), 0)), "it can only be closed"
    old.close()
    assert np.array_equal(behaviours.prefill(new, 1, tokens[7:], start=7), expected)


def test_lanes_of_another_layout_are_not_adopted(engine: OpenEngine) -> None:
    old, new = engine(fresh=True), engine(fresh=True, lanes=1)
    assert behaviours.refuses(lambda: new.adopt_kv(old))
    behaviours.decode_equals_prefill(old)


def test_decode_spans_far_apart_lanes(engine: OpenEngine) -> None:
    """More lanes than decode bindings are kept for, in every pair."""
    many = engine(lanes=14, max_seq_len=40)
    tokens = behaviours.some_tokens(many, 6)
    for lane in range(14):
        behaviours.prefill(many, lane, tokens[:5])
    expected = behaviours.decode(many, {0: (int(tokens[5]), 5)})[0]
    for low in range(14):
        for high in range(low + 1, 14):
            both = behaviours.decode(many, {high: (int(tokens[5]), 5), low: (int(tokens[5]), 5)})
            assert np.array_equal(both[low], expected)
            assert np.array_equal(both[high], expected)


@pytest.fixture(scope="module", params=["int8", "fp32"])
def demo(request: pytest.FixtureRequest) -> Iterator[Engine]:
    release = "demo_release" if request.param == "int8" else "demo_release_fp32"
    engine = open_release(
        request.getfixturevalue(release), EngineOptions(threads=2, lanes=3, max_seq_len=400)
    )
    yield engine
    engine.close()


def test_the_demo_model_has_the_same_bits_however_it_is_split(demo: Engine) -> None:
    """Parts end within the attention kernel's blocks of 128 queries, one query past them too."""
    tokens = behaviours.some_tokens(demo, 289)
    whole = behaviours.prefill(demo, 0, tokens)
    kept = behaviours.cached(demo, 0, 288)
    for cuts in ([129, 1, 159], [257, 32], [1, 2, 3, 130, 128]):
        assert np.array_equal(behaviours.prefill(demo, 1, tokens, cuts=cuts), whole), cuts
        assert np.array_equal(behaviours.cached(demo, 1, 288), kept), cuts
    behaviours.prefill(demo, 2, tokens[:280])
    for position in range(280, 289):
        rows = {2: (int(tokens[position]), position), 0: (int(tokens[position]), position)}
        stepped = behaviours.decode(demo, rows)
    assert np.array_equal(stepped[2], whole)
    assert np.array_equal(behaviours.cached(demo, 2, 288), kept)


def test_bits_are_the_same_across_blocks_of_the_cache(tmp_path: Path) -> None:
    """The attention kernel goes over a long cache in several blocks: here, 1 MiB of level-2 cache, of 256."""
    decoder = random_decoder(head_dim=128, query_heads=2, kv_heads=1)
    options = BuildOptions(lanes=2, max_seq_len=1600, max_prefill_tokens=1024, precision="fp32")
    engine = open_release(
        build_release(decoder, tmp_path, model="m", release=1, options=options), EngineOptions(threads=2)
    )
    tokens = behaviours.some_tokens(engine, 1600)
    whole = behaviours.prefill(engine, 0, tokens)
    for cuts in ([511, 2, 1, 385, 126], [257, 255, 1, 513, 2, 31], [1024, 1, 1, 1, 513]):
        assert np.array_equal(behaviours.prefill(engine, 1, tokens, cuts=cuts), whole), cuts
        assert np.array_equal(behaviours.cached(engine, 0, 1600), behaviours.cached(engine, 1, 1600)), cuts
    engine.close()


def test_the_demo_model_answers(demo_release_fp32: Path) -> None:
    engine = open_release(demo_release_fp32, EngineOptions(threads=2, lanes=1, max_seq_len=100))
    tokenizer = Tokenizer.from_file(str(demo_release_fp32 / "tokenizer.json"))
    prompt = np.array(tokenizer.encode(QUESTION, add_special_tokens=False).ids)
    answer = [int(behaviours.prefill(engine, 0, prompt).argmax())]
    while answer[-1] != 2:
        position = len(prompt) + len(answer) - 1
        answer.append(int(behaviours.decode(engine, {0: (answer[-1], position)})[0].argmax()))
    engine.close()
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_the_golden_token_is_the_engines_answer(demo_release: Path) -> None:
    manifest, _ = read(demo_release)
    engine = open_release(demo_release, EngineOptions(threads=1, lanes=1, max_seq_len=100))
    logits = np.sort(behaviours.prefill(engine, 0, np.array(manifest.golden.prompt)))
    engine.close()
    assert manifest.golden.margin >= 1.0
    assert logits[-1] - logits[-2] == pytest.approx(manifest.golden.margin, abs=1e-3)
