"""deploy, rollback, releases and verify --running while a real server serves."""

import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from engines import current_digest, sign_release
from engines.manifest import EngineManifest, encode_manifest, parse_manifest
from scripts.cli import main
from tests.e2e.conftest import MODEL, Triton

WAIT = ("--wait", "120")


def words(triton: Triton, verb: str, *more: str) -> list[str]:
    ports = ["--url", triton.http_url, "--metrics-port", str(triton.address.metrics_port)]
    return [verb, *more, "--home", str(triton.home.root), *ports]


def resigned(signed_demo: tuple[Path, Path, Path], folder: Path, **changes: object) -> Path:
    """The demo release with another engine.json; weights are shared, they are never written."""
    source, private, _ = signed_demo
    shutil.copytree(source, folder, copy_function=os.link)
    (folder / "engine.json").unlink()
    (folder / "model.sig").unlink()
    manifest = parse_manifest((source / "engine.json").read_bytes())
    changed: EngineManifest = msgspec.structs.replace(manifest, **changes)
    (folder / "engine.json").write_bytes(encode_manifest(changed))
    sign_release(folder, private)
    return folder


def test_a_release_is_deployed_served_verified_refused_and_rolled_back(
    triton: Triton,
    signed_demo: tuple[Path, Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    version = triton.home.repository / MODEL / "1"
    first = current_digest(version)
    try:
        second = resigned(signed_demo, tmp_path / "second", release=1002)
        assert main(words(triton, "deploy", MODEL, str(second), *WAIT)) == 0
        deployed = current_digest(version)
        out = capsys.readouterr().out
        assert f"current      release 1002 ({deployed[:16]})" in out
        assert re.search(rf"serves now   {deployed[:16]} at {triton.http_url}", out)

        assert main(words(triton, "releases", MODEL)) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(deployed[:16] in line and "current, serves" in line for line in lines)
        assert any(first[:16] in line and "previous" in line for line in lines)

        assert main(words(triton, "verify", "--running", MODEL, "--rate", "2000")) == 0
        assert f"digest       {deployed}" in capsys.readouterr().out

        golden = parse_manifest((second / "engine.json").read_bytes()).golden
        wrong = msgspec.structs.replace(golden, token=golden.token + 1)
        third = resigned(signed_demo, tmp_path / "third", release=1003, golden=wrong)
        assert main(words(triton, "deploy", MODEL, str(third), *WAIT)) == 1
        said = capsys.readouterr().err
        refused = rf"refused {current_digest(version)[:16]}: golden: expected token {wrong.token} .*"
        assert re.search(rf"{refused}; serves: {deployed[:16]}", said)

        assert main(words(triton, "rollback", MODEL, *WAIT)) == 0
        assert f"serves now   {deployed[:16]} at" in capsys.readouterr().out
    finally:
        assert main(words(triton, "rollback", MODEL, "--to", first, *WAIT)) == 0
    assert re.search(rf"serves now   {first[:16]} at {triton.http_url}", capsys.readouterr().out)
    assert main(words(triton, "releases", MODEL, "--prune", "1")) == 0
    assert main(words(triton, "verify", "--running", MODEL)) == 0
