"""`tensorcache build`: what it refuses before it reads anything, and what it says of what it built."""

from pathlib import Path

import msgspec
import pytest

import engines.driver
from engines.layer_report import REPORT_FILE, LayerReport, ProfileLayers
from engines.manifest import EngineManifest, FileEntry, ProfileInfo, TensorRTInfo, encode_manifest
from scripts.build_report import lane_bytes, show_built, token_bytes
from scripts.cli import main
from tests.engines.conftest import TINY_FILES, tiny_manifest
from tests.engines.random_decoder import random_decoder
from tests.rig.plugin import Rig


def built(*words: str) -> int:
    return main(["build", "not-there.gguf", "--target", "tensorrt", *words])


def test_a_plan_without_a_driver_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines.driver, "LIBRARY", "libcuda-of-no-machine.so")
    assert built("--out", str(tmp_path / "plan")) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "expected NVIDIA's driver library libcuda-of-no-machine.so, found none" in said
    assert "`make setup EXTRA=gpu-cu13`" in said
    assert list(tmp_path.iterdir()) == []


def test_a_precision_of_the_other_target_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert built("--out", str(tmp_path / "plan"), "--precision", "int8") == 2
    said = capsys.readouterr().err
    assert "precision: must be one of float16, bfloat16, int4 for tensorrt, got 'int8'" in said
    assert list(tmp_path.iterdir()) == []


def test_the_command_builds_a_plan_and_tells_what_it_costs(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.build.load_decoder", lambda source, max_seq_len: random_decoder())
    out = tmp_path / "small"
    words = ("--out", str(out), "--max-seq-len", "256", "--lanes", "2", "--max-prefill-tokens", "64")
    assert built(*words) == 0
    said = capsys.readouterr().out
    assert "small release 1 (tensorrt, float16)" in said
    assert "activations of a prefill of 64" in said
    assert "attentions fused" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [".timing", "small"]
    assert built(*words, "--precision", "bfloat16", "--timing-cache", str(tmp_path / "times")) == 0
    assert "(tensorrt, bfloat16)" in capsys.readouterr().out
    assert len(list((tmp_path / "times").iterdir())) == 1


INFO = TensorRTInfo(
    version="10.16.0.72",
    compute_capability="9.0",
    gpu_name="NVIDIA H100 80GB HBM3",
    profiles=(
        ProfileInfo(rows=1, tokens=512, least_window=256, window=4128, activation_bytes=300 << 20),
        ProfileInfo(rows=8, tokens=1, least_window=256, window=4128, activation_bytes=2 << 20),
    ),
    weight_error=0.0712,
)
REPORT = LayerReport(
    profiles=(
        ProfileLayers(
            profile="prefill", fused=("layers.0.attention",), unfused=("layers.1.attention",),
            activation_bytes=300 << 20, layers=("a", "b", "c"),
        ),
        ProfileLayers(
            profile="decode", fused=("layers.0.attention", "layers.1.attention"), unfused=(),
            activation_bytes=2 << 20, layers=("a", "b"),
        ),
    )
)  # fmt: skip


def plan_release(folder: Path, **changes: object) -> EngineManifest:
    """A folder with the description of a plan of 1 GiB, which itself is not needed."""
    manifest = tiny_manifest(
        TINY_FILES, runtime="tensorrt", kv_dtype="float16", graph="model.plan", precision="int4",
        max_seq_len=4096, lanes=8, tensorrt=INFO,
    )  # fmt: skip
    files = {"model.plan": FileEntry("0" * 64, 1 << 30), REPORT_FILE: FileEntry("0" * 64, 1)}
    manifest = msgspec.structs.replace(manifest, files=files, **changes)
    (folder / "engine.json").write_bytes(encode_manifest(manifest))
    (folder / REPORT_FILE).write_bytes(REPORT.encode())
    return manifest


def test_memory_and_layers_of_a_plan_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = plan_release(tmp_path)
    show_built(tmp_path)
    said = capsys.readouterr().out
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("│") for line in said.splitlines())
        if len(cells) > 3
    }
    g = manifest.geometry
    assert token_bytes(manifest) == g.layers * 2 * g.kv_heads * g.head_dim * 2 == 256
    assert lane_bytes(manifest) == 256 * 4128, "scratch positions take room too"
    assert rows["KV of one cached token"] == ["256 B"]
    assert rows["KV of one lane"] == ["1.0 MiB (4096 tokens)"]
    assert rows["activations of a prefill of 512"] == ["300.0 MiB"]
    assert rows["activations of a decode of 8"] == ["2.0 MiB"]
    assert rows["GPU memory to serve it, at least"] == ["1.3 GiB"]
    assert rows["error of weights in 4 bits"] == ["7.12%"]
    assert rows["built for"] == ["NVIDIA H100 80GB HBM3"]
    assert rows["prefill"] == ["1", "1", "3", "300.0 MiB"]
    assert rows["decode"] == ["2", "0", "2", "2.0 MiB"]
    assert "unfused in prefill: layers.1.attention\n" in said


def test_a_plan_for_a_capability_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = msgspec.structs.replace(INFO, built_for="capability")
    plan_release(tmp_path, tensorrt=info, precision="float16")
    show_built(tmp_path)
    said = capsys.readouterr().out
    assert "compute capability 9.0" in said
    assert "4 bits" not in said
