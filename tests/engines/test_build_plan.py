"""A TensorRT release from weights to a served engine, on a stand-in driver and a double of TensorRT."""

import dataclasses
import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engines import (
    EngineOptions,
    TrustSettings,
    generate_signing_key,
    load_release_dir,
    open_engine,
    plan_builder,
    sign_release,
)
from engines.build import BuildOptions, PlanOptions, build_release
from engines.decoder import Decoder
from engines.errors import BuildError, DeviceError
from engines.layer_report import REPORT_FILE, read_report
from engines.manifest import MANIFEST, EngineManifest, parse_manifest
from engines.plan_header import check_plan
from tests.engines.random_decoder import random_decoder
from tests.rig import builder_double, plans
from tests.rig.plugin import Rig

OPTIONS = BuildOptions(
    target="tensorrt", precision="float16", lanes=4, max_seq_len=240, block_tokens=16, max_prefill_tokens=128
)


def build(folder: Path, decoder: Decoder | None = None, **changes: Any) -> Path:
    options = msgspec.structs.replace(OPTIONS, **changes)
    return build_release(decoder or random_decoder(), folder, model="small", release=1, options=options)


def manifest_of(folder: Path) -> EngineManifest:
    return parse_manifest((folder / MANIFEST).read_bytes())


def test_a_release_holds_plan_report_and_what_the_plan_is_bound_to(rig: Rig, tmp_path: Path) -> None:
    folder = build(tmp_path)
    manifest = manifest_of(folder)
    assert set(manifest.files) == {"model.plan", REPORT_FILE, "tokenizer.json"}
    assert {path.name for path in folder.iterdir()} == {*manifest.files, MANIFEST}, "the weights file is gone"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    for name, entry in manifest.files.items():
        assert entry.sha256 == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert (manifest.runtime, manifest.graph, manifest.kv_dtype) == ("tensorrt", "model.plan", "float16")
    assert (manifest.exact, manifest.kernel_class) == (False, "")
    info = manifest.tensorrt
    assert info is not None
    assert (info.version, info.built_for, info.weight_error) == (plans.VERSION, "gpu", 0.0)
    prefill, decode = info.profiles
    assert (prefill.rows, prefill.tokens, decode.rows, decode.tokens) == (1, 128, 4, 1)
    assert prefill.activation_bytes > decode.activation_bytes > 0
    check_plan(
        manifest, memoryview((folder / "model.plan").read_bytes()),
        library=plans.VERSION, compute_capability=info.compute_capability, gpu_name=info.gpu_name,
    )  # fmt: skip
    report = read_report((folder / REPORT_FILE).read_bytes())
    assert [(profile.profile, len(profile.fused)) for profile in report.profiles] == [
        ("prefill", 2),
        ("decode", 2),
    ]


def test_a_signed_plan_is_loaded_and_opened(rig: Rig, tmp_path: Path) -> None:
    folder = build(tmp_path / "releases")
    private, public = generate_signing_key(tmp_path / "keys")
    sign_release(folder, private)
    release = load_release_dir(folder, model="small", trust=TrustSettings(keys=(public,)))
    engine = open_engine(release, EngineOptions())
    try:
        assert engine.spec.kv_identity.hex() == release.manifest.kv_identity
    finally:
        engine.close()


def test_the_error_of_four_bits_is_in_manifest_and_report(rig: Rig, tmp_path: Path) -> None:
    folder = build(tmp_path, precision="int4")
    info = manifest_of(folder).tensorrt
    errors = read_report((folder / REPORT_FILE).read_bytes()).weight_errors
    assert info is not None
    assert len(errors) == 14
    assert info.weight_error == pytest.approx(np.sqrt(np.mean(np.square([*errors.values()]))), abs=1e-5)
    assert 0.05 < info.weight_error < 0.12


def test_the_identity_of_kv_has_neither_library_nor_gpu_in_it(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = build(tmp_path / "one")
    monkeypatch.setattr("engines.build_tensorrt.TensorRTInfo", _another_place)
    other = build(tmp_path / "other")
    assert manifest_of(one).tensorrt != manifest_of(other).tensorrt
    assert manifest_of(one).kv_identity == manifest_of(other).kv_identity


def _another_place(**fields: Any) -> Any:
    from engines.manifest import TensorRTInfo

    return TensorRTInfo(
        **(fields | {"version": "10.15.1.29", "gpu_name": "another", "compute_capability": "9.0"})
    )


def test_everything_kv_depends_on_is_in_its_identity(rig: Rig, tmp_path: Path) -> None:
    plain = random_decoder()
    folders = {
        "plain": build(tmp_path, plain),
        "precision": build(tmp_path, plain, precision="bfloat16"),
        "4 bits": build(tmp_path, plain, precision="int4"),
        "weights": build(tmp_path, random_decoder(seed=2)),
        "block": build(tmp_path, plain, block_tokens=32),
        "CPU": build(tmp_path, plain, target="onnxruntime", precision="fp32"),
    }
    identities = {manifest_of(folder).kv_identity for folder in folders.values()}
    assert len(identities) == len(folders)
    room = build(tmp_path, plain, lanes=2, max_seq_len=112, max_prefill_tokens=64)
    assert manifest_of(room).kv_identity == manifest_of(folders["plain"]).kv_identity


def test_kernel_times_are_kept_beside(rig: Rig, tmp_path: Path) -> None:
    build(tmp_path / "out", plan=PlanOptions(timing_cache=tmp_path / "times"))
    (file,) = (tmp_path / "times").iterdir()
    assert file.name.startswith(f"tensorrt-{plans.VERSION}-")


def test_a_network_that_would_answer_wrongly_is_not_built(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        builder_double.IAttention, "mask", property(lambda self: None, lambda self, mask: None), raising=False
    )
    with pytest.raises(BuildError, match=r"network: layers\.0\.attention is an attention without a mask"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_tensorrt_refuses_is_told_in_its_words(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_most_nothing = plan_builder.Sizes(rows=1, tokens=1, window=1)
    real = plan_builder.profiles_of

    def profiles_of(options: BuildOptions) -> tuple[plan_builder.Profile, ...]:
        return tuple(dataclasses.replace(profile, most=at_most_nothing) for profile in real(options))

    monkeypatch.setattr(plan_builder, "profiles_of", profiles_of)
    with pytest.raises(BuildError, match=r"plan: TensorRT takes no shapes .* inconsistent with other shapes"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_does_not_open_leaves_nothing(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        builder_double.Builder, "build_serialized_network", lambda self, network, config: None
    )
    with pytest.raises(BuildError, match=r"plan: TensorRT .* builds none: "):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_is_too_old_is_named(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = SimpleNamespace(ATTENTION_INPUT=1)
    monkeypatch.setattr(sys.modules["tensorrt"], "LayerType", old)
    monkeypatch.setattr(sys.modules["tensorrt"], "__version__", "10.14.1.48")
    said = r"^TensorRT: expected 10\.15 or later, found 10\.14\.1\.48: install the extra gpu-cu13 "
    with pytest.raises(DeviceError, match=said):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_nothing_is_begun(tmp_path: Path) -> None:
    read: list[str] = []
    decoder = random_decoder()

    class Watched(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            read.append(name)
            return super().__getitem__(name)

    fields = {
        name: getattr(decoder, name) for name in ("config", "tokenizer_json", "chat_template", "source")
    }
    watched = Decoder(weights=Watched(decoder.weights), **fields)
    with pytest.raises(DeviceError, match=r"^(driver|device|TensorRT|pycuda): "):
        build(tmp_path, watched, plan=PlanOptions(device=99))
    assert read == []
    assert list(tmp_path.iterdir()) == []
