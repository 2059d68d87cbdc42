"""Fixtures: tiny signed releases (a few small files and a valid engine.json; no model behind them)."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from engines.contract import Geometry
from engines.errors import ReleaseError
from engines.loading import load_release
from engines.manifest import EngineManifest, FileEntry, Golden, encode_manifest, parse_manifest
from engines.signing import generate_signing_key, sign_release
from engines.trust import TrustSettings

TINY_FILES = {
    "model.onnx": b"\x08\x0a" + bytes(range(256)) * 4,
    "model.onnx.data": hashlib.shake_256(b"weights").digest(300_001),
    "tokenizer.json": b'{"version": "1.0", "model": {"type": "BPE"}}\n',
}


@dataclass(frozen=True)
class Keys:
    private: Path
    public: Path

    @property
    def trust(self) -> TrustSettings:
        return TrustSettings(keys=(self.public,))


def tiny_manifest(files: dict[str, bytes], **changes: Any) -> EngineManifest:
    entries = {name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}
    manifest = EngineManifest(
        format="tensorcache-engine/1",
        model="tiny",
        release=3,
        runtime="onnxruntime",
        graph="model.onnx",
        files=entries,
        geometry=Geometry(layers=2, hidden=64, query_heads=4, kv_heads=2, head_dim=16, vocab_size=100),
        precision="int8",
        kv_dtype="float32",
        kv_layout="linear",
        block_tokens=32,
        lanes=2,
        max_seq_len=128,
        max_prefill_tokens=64,
        exact=True,
        kv_identity="00112233445566778899aabbccddeeff",
        kernel_class="any",
        weights_digest="w",
        tokenizer_digest=hashlib.sha256(files.get("tokenizer.json", b"")).hexdigest(),
        eos_token_ids=(2,),
        bos_token_id=None,
        add_bos=False,
        chat_template=None,
        golden=Golden(prompt=(1, 2, 3), token=4, margin=1.0),
    )
    return msgspec.structs.replace(manifest, **changes)


def refusal(call: Callable[[], object]) -> ReleaseError:
    """The refusal that `call` must end in: one line that says step, expected and found."""
    with pytest.raises(ReleaseError) as caught:
        call()
    error = caught.value
    assert "\n" not in str(error)
    assert str(error) == f"{error.step}: expected {error.expected}, found {error.found}"
    assert error.expected
    assert error.found
    return error


Resign = Callable[..., Path]


@pytest.fixture
def resign(tmp_path: Path, keys: Keys) -> Resign:
    """resign(release folder, *, replace={name: bytes}, **manifest fields) → an altered, signed copy."""

    def alter(folder: Path, *, replace: Mapping[str, bytes] = MappingProxyType({}), **changes: Any) -> Path:
        copy = tmp_path / "altered"
        shutil.copytree(folder, copy)
        manifest = parse_manifest((copy / "engine.json").read_bytes())
        files = dict(manifest.files)
        for name, data in replace.items():
            (copy / name).write_bytes(data)
            files[name] = FileEntry(hashlib.sha256(data).hexdigest(), len(data))
        manifest = msgspec.structs.replace(manifest, files=files, **changes)
        (copy / "engine.json").write_bytes(encode_manifest(manifest))
        sign_release(copy, keys.private)
        return copy

    return alter


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(*generate_signing_key(tmp_path_factory.mktemp("keys")))


@pytest.fixture(scope="session")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(*generate_signing_key(tmp_path_factory.mktemp("other-keys")))


@pytest.fixture
def write_release(tmp_path: Path, keys: Keys) -> Callable[..., Path]:
    """write_release(name="release", *, files=…, sign=True, key=…, **manifest fields) → its folder."""

    def write(
        name: str = "release",
        *,
        files: dict[str, bytes] = TINY_FILES,
        sign: bool = True,
        key: Path = keys.private,
        **changes: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        (folder / "engine.json").write_bytes(encode_manifest(tiny_manifest(files, **changes)))
        if sign:
            sign_release(folder, key)
        return folder

    return write


def _publish_by_hand(release: Path, version: Path) -> str:
    digest = hashlib.sha256((release / "engine.json").read_bytes()).hexdigest()
    shutil.copytree(release, version / "releases" / digest, symlinks=True)
    (version / "current").write_text(digest + "\n")
    return digest


@pytest.fixture
def version(tmp_path: Path, write_release: Callable[..., Path]) -> Path:
    """A version folder that serves a tiny release."""
    folder = tmp_path / "repo" / "tiny" / "1"
    _publish_by_hand(write_release(), folder)
    return folder


@pytest.fixture
def load(version: Path, keys: Keys) -> Callable[[], object]:
    """Load the release that `version` serves."""
    return lambda: load_release(version, model="tiny", trust=keys.trust)


@pytest.fixture
def served(version: Path) -> Path:
    """The folder of the release that `version` serves."""
    return version / "releases" / (version / "current").read_text().strip()
