"""Built releases: bytes fixed by the manifest, reproducible, identified by what their KV depends on."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.build import GOLDEN_MARGIN, BuildOptions, build_release, kv_identity
from engines.decoder import Decoder
from engines.errors import BuildError
from engines.manifest import MANIFEST, EngineManifest, parse_manifest
from tests.engines.random_decoder import random_decoder

OPTIONS = BuildOptions(lanes=2, max_seq_len=100, block_tokens=16, max_prefill_tokens=64)


def build(decoder: Decoder, out: Path, *, release: int = 1, **changes: Any) -> Path:
    options = msgspec.structs.replace(OPTIONS, **changes)
    return build_release(decoder, out, model="small", release=release, options=options)


def manifest_of(folder: Path) -> EngineManifest:
    return parse_manifest((folder / MANIFEST).read_bytes())


def test_the_folder_is_named_by_its_manifest_which_fixes_every_other_file(tmp_path: Path) -> None:
    folder = build(random_decoder(), tmp_path)
    assert folder.name == hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
    named = {name: (entry.sha256, entry.size) for name, entry in manifest_of(folder).files.items()}
    assert named == {name: (hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name], "no temporary folder is left"


def test_equal_input_gives_an_equal_release(tmp_path: Path) -> None:
    one = build(random_decoder(), tmp_path / "a")
    other = build(random_decoder(), tmp_path / "b")
    assert one.name == other.name
    assert all((other / path.name).read_bytes() == path.read_bytes() for path in one.iterdir())


def test_a_release_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    folder = build(random_decoder(), tmp_path)
    (folder / "model.sig").write_text("a signature")
    assert build(random_decoder(), tmp_path) == folder
    assert (folder / "model.sig").read_text() == "a signature"


def test_the_manifest_tells_the_decoder(tmp_path: Path) -> None:
    decoder = random_decoder()
    manifest = manifest_of(build(decoder, tmp_path, release=7))
    assert (manifest.model, manifest.release, manifest.runtime, manifest.precision) == (
        "small", 7, "onnxruntime", "int8",
    )  # fmt: skip
    assert manifest.geometry == decoder.config.geometry
    assert (manifest.lanes, manifest.max_seq_len, manifest.max_prefill_tokens) == (2, 100, 64)
    assert manifest.eos_token_ids == (0,)
    assert manifest.golden.margin >= GOLDEN_MARGIN
    assert 0 <= manifest.golden.token < decoder.config.geometry.vocab_size


@pytest.mark.parametrize(
    "changes",
    [{"lanes": 3}, {"max_seq_len": 200}, {"max_prefill_tokens": 32}],
    ids=lambda changes: next(iter(changes)),
)
def test_room_does_not_change_what_kv_means(changes: dict[str, int], tmp_path: Path) -> None:
    one, other = build(random_decoder(), tmp_path), build(random_decoder(), tmp_path, **changes)
    assert one != other
    assert manifest_of(one).kv_identity == manifest_of(other).kv_identity


def test_everything_kv_depends_on_changes_the_identity(tmp_path: Path) -> None:
    plain = random_decoder()
    rope = msgspec.structs.replace(plain.config, rope_inv_freq=(0.5, *plain.config.rope_inv_freq[1:]))
    eps = msgspec.structs.replace(plain.config, norm_eps=2e-5)
    norm = dict(plain.weights) | {"layers.1.mlp_norm": plain.weights["layers.1.mlp_norm"] * np.float32(1.01)}
    tokenizer = plain.tokenizer_json.replace(b"<|end|>", b"<|END|>")
    built = {
        "plain": build(plain, tmp_path),
        "weights": build(random_decoder(seed=2), tmp_path),
        "a norm": build(replace(plain, weights=norm), tmp_path),
        "rope": build(replace(plain, config=rope), tmp_path),
        "eps": build(replace(plain, config=eps), tmp_path),
        "tokenizer": build(replace(plain, tokenizer_json=tokenizer), tmp_path),
        "precision": build(plain, tmp_path, precision="fp32"),
        "int4": build(plain, tmp_path, precision="int4"),
        "block": build(plain, tmp_path, block_tokens=32),
    }
    identities = {name: manifest_of(folder).kv_identity for name, folder in built.items()}
    assert len(set(identities.values())) == len(built), identities


def replace(decoder: Decoder, **changes: Any) -> Decoder:
    fields = {
        name: getattr(decoder, name)
        for name in ("config", "weights", "tokenizer_json", "chat_template", "source")
    }
    return Decoder(**(fields | changes))


def test_identity_fields_cannot_run_into_each_other() -> None:
    assert kv_identity({"a": "bc", "d": ""}) != kv_identity({"ab": "c", "d": ""})
    assert kv_identity({"a": "1", "b": "2"}) == kv_identity({"b": "2", "a": "1"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "int3"}, "precision: must be one of int8, int4, fp32 for onnxruntime, got 'int3'"),
        ({"block_tokens": 24}, "block_tokens: must be a power of two in 8 … 512, got 24"),
        ({"block_tokens": 4}, "block_tokens: must be a power of two in 8 … 512, got 4"),
        ({"lanes": 0}, "lanes: must be in 1 … 1024, got 0"),
        ({"max_seq_len": 8193}, "max_seq_len: must be in 2 … 8192, got 8193"),
        ({"max_prefill_tokens": 101}, "max_prefill_tokens: must be in 2 … 100, got 101"),
        ({"release": 0}, "release: must be in 1 … "),
    ],
)
def test_options_out_of_range_are_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=said):
        build(random_decoder(), tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        (random_decoder(query_heads=3), "query_heads: must be a multiple of kv_heads 2, got 3"),
        (random_decoder(head_dim=24), "head_dim: must be a multiple of 16 for int8, got 24"),
    ],
)
def test_decoders_no_graph_can_be_built_from_are_named(decoder: Decoder, said: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=said):
        build(decoder, tmp_path)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (0.0, "golden token: no prompt separates its best two tokens by 1.0"),
        (np.nan, "logits that are not finite"),
    ],
)
def test_an_engine_without_a_clear_answer_is_not_released(scale: float, said: str, tmp_path: Path) -> None:
    decoder = random_decoder()
    weights = dict(decoder.weights) | {"norm": decoder.weights["norm"] * np.float32(scale)}
    with pytest.raises(BuildError, match=said):
        build(replace(decoder, weights=weights), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    build_release(
        random_decoder(), tmp_path, model="small", release=1, options=OPTIONS,
        progress=lambda stage, done: told.append((stage, done)),
    )  # fmt: skip
    fractions = [done for stage, done in told if stage == "weights"]
    assert fractions == sorted(fractions)
    assert 0.0 <= fractions[0] < fractions[-1] <= 1.0
    assert told[-1][0] == "golden token"
