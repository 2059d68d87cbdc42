"""Keys and signatures: what is written, what is refused before anything is signed."""

import base64
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from engines.errors import ReleaseError
from engines.loading import load_release_dir
from engines.manifest import encode_manifest
from engines.signing import generate_signing_key, sign_release, verify_signature
from engines.trust import TrustSettings
from tests.engines.conftest import TINY_FILES, Keys, tiny_manifest
from tests.full_disk import REASON, room_for

WriteRelease = Callable[..., Path]


def payload_of(signature: Path) -> dict[str, Any]:
    payload = json.loads(base64.b64decode(json.loads(signature.read_text())["dsseEnvelope"]["payload"]))
    assert isinstance(payload, dict)
    return payload


def test_the_private_key_is_for_its_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        private, public = generate_signing_key(tmp_path / "new" / "keys")
    finally:
        os.umask(old)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert b"PRIVATE" in private.read_bytes()
    assert b"PRIVATE" not in public.read_bytes()


def test_keys_are_never_replaced(tmp_path: Path) -> None:
    private, public = generate_signing_key(tmp_path)
    before = private.read_bytes(), public.read_bytes()
    with pytest.raises(ReleaseError, match="never replaced"):
        generate_signing_key(tmp_path)
    assert (private.read_bytes(), public.read_bytes()) == before


def test_a_public_key_in_the_way_leaves_no_private_one(tmp_path: Path) -> None:
    (tmp_path / "release.pub").write_text("mine")
    with pytest.raises(ReleaseError, match=r"release\.pub"):
        generate_signing_key(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["release.pub"]


def test_a_full_disk_leaves_neither_half_of_a_pair(tmp_path: Path) -> None:
    for room in (0, 200):  # 200 bytes hold the public half alone
        with room_for(room), pytest.raises(ReleaseError, match=f"to write to {tmp_path}, found {REASON}"):
            generate_signing_key(tmp_path)
        assert list(tmp_path.iterdir()) == []
    assert {path.name for path in generate_signing_key(tmp_path)} == {"release.key", "release.pub"}


def test_half_a_pair_and_an_incomplete_one_are_told_apart(tmp_path: Path) -> None:
    private, public = generate_signing_key(tmp_path)
    public.rename(tmp_path / "kept")
    with pytest.raises(
        ReleaseError, match=r"half a pair: .*release\.key without .*release\.pub .*move release\.key"
    ):
        generate_signing_key(tmp_path)
    (tmp_path / "kept").rename(public)
    private.write_bytes(b"")
    with pytest.raises(ReleaseError, match=r"incomplete pair: .*release\.key is empty \(delete both"):
        generate_signing_key(tmp_path)


def test_a_private_key_that_appears_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def late(source: Path, target: Path) -> None:
        if target.name == "release.key":
            target.write_text("the other's")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ReleaseError, match="File exists"):
        generate_signing_key(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("release.key", "the other's")]


def test_a_full_disk_keeps_the_old_signature_and_leaves_no_other(
    write_release: WriteRelease, keys: Keys, tmp_path: Path
) -> None:
    folder = write_release()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with room_for(100), pytest.raises(ReleaseError, match=REASON):
        sign_release(folder, keys.private)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_disk_fails_under_the_signature_alone(
    write_release: WriteRelease, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder has room, the release's disk has none: model.sig.<hex> does not stay."""
    folder = write_release(sign=False)
    names = {path.name for path in folder.iterdir()}

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReleaseError, match=r"to write .*/model\.sig, found No space left on device"):
        sign_release(folder, keys.private)
    assert {path.name for path in folder.iterdir()} == names


def test_the_signature_names_every_file_and_ignores_only_itself(write_release: WriteRelease) -> None:
    payload = payload_of(write_release() / "model.sig")
    predicate = payload["predicate"]
    assert {resource["name"] for resource in predicate["resources"]} == {*TINY_FILES, "engine.json"}
    assert predicate["serialization"]["ignore_paths"] == ["model.sig"]
    assert predicate["serialization"]["allow_symlinks"] is False


def test_verifying_gives_the_signed_digests(write_release: WriteRelease, keys: Keys) -> None:
    folder = write_release()
    digests = verify_signature((folder / "model.sig").read_bytes(), [keys.public])
    entries = tiny_manifest(TINY_FILES).files
    assert {name: digests[name] for name in TINY_FILES} == {name: entries[name].sha256 for name in TINY_FILES}
    assert digests.keys() == {*TINY_FILES, "engine.json"}


def test_signing_again_with_another_key_replaces_the_signature(
    write_release: WriteRelease, keys: Keys, other_keys: Keys
) -> None:
    folder = write_release()
    assert sign_release(folder, other_keys.private) == folder / "model.sig"
    assert load_release_dir(folder, trust=other_keys.trust).manifest.model == "tiny"
    with pytest.raises(ReleaseError, match="trusted key"):
        load_release_dir(folder, trust=keys.trust)
    assert {path.name for path in folder.iterdir()} == {*TINY_FILES, "engine.json", "model.sig"}


@pytest.mark.parametrize(
    "curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name
)
def test_each_supported_curve_signs_and_verifies(
    write_release: WriteRelease, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    key = ec.generate_private_key(curve)
    private, public = tmp_path / "k", tmp_path / "k.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    folder = write_release(key=private)
    assert load_release_dir(folder, trust=TrustSettings(keys=(public,))).manifest.model == "tiny"


def _private_pem(kind: str) -> bytes:
    encryption = BestAvailableEncryption(b"secret") if kind == "encrypted" else NoEncryption()
    keys = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
        "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
        "encrypted": lambda: ec.generate_private_key(ec.SECP256R1()),
    }
    return bytes(keys[kind]().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "secp256k1", "encrypted", "public", "junk", "missing"])
def test_other_keys_are_refused_and_nothing_is_written(
    write_release: WriteRelease, tmp_path: Path, keys: Keys, kind: str
) -> None:
    folder = write_release(sign=False)
    key = tmp_path / "key"
    if kind == "public":
        key = keys.public
    elif kind == "junk":
        key.write_bytes(b"\0\xff" * 20)
    elif kind != "missing":
        key.write_bytes(_private_pem(kind))
    with pytest.raises(ReleaseError) as caught:
        sign_release(folder, key)
    assert caught.value.step == "signing key"
    assert str(key) in caught.value.found
    assert "\n" not in str(caught.value)
    assert not (folder / "model.sig").exists()


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "secp256k1"])
def test_other_kinds_of_trusted_keys_are_refused(
    write_release: WriteRelease, tmp_path: Path, kind: str
) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(_private_pem(kind), None).public_key()
    path = tmp_path / "k.pub"
    path.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(ReleaseError, match="P-256"):
        load_release_dir(write_release(), trust=TrustSettings(keys=(path,)))


def _extra_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("x")


def _git_file(folder: Path) -> None:
    (folder / ".gitignore").write_text("*")


def _missing_file(folder: Path) -> None:
    (folder / "model.onnx.data").unlink()


def _subfolder(folder: Path) -> None:
    (folder / "sub").mkdir()


def _symlink(folder: Path) -> None:
    (folder / "model.onnx").rename(folder.parent / "real")
    (folder / "model.onnx").symlink_to(folder.parent / "real")


def _altered(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(TINY_FILES["model.onnx"][::-1])


def _no_manifest(folder: Path) -> None:
    (folder / "engine.json").unlink()


def _bad_manifest(folder: Path) -> None:
    (folder / "engine.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (_extra_file, "folder"),
        (_git_file, "folder"),
        (_missing_file, "folder"),
        (_subfolder, "folder"),
        (_symlink, "folder"),
        (_altered, "digest"),
        (_no_manifest, "manifest"),
        (_bad_manifest, "manifest"),
    ],
)
def test_what_could_never_load_is_not_signed(
    write_release: WriteRelease, keys: Keys, change: Callable[[Path], None], step: str
) -> None:
    folder = write_release(sign=False)
    change(folder)
    with pytest.raises(ReleaseError) as caught:
        sign_release(folder, keys.private)
    assert caught.value.step == step
    assert not (folder / "model.sig").exists()


# --- signatures that a trusted key made, but with settings that leave something out ---


def _sign_with_library(folder: Path, key: Path, **hashing_options: Any) -> None:
    from model_signing import hashing, signing

    config = hashing.Config()
    if shards := hashing_options.pop("shards", None):
        config.use_shard_serialization(shard_size=shards)
    if algorithm := hashing_options.pop("algorithm", None):
        config.use_file_serialization(hashing_algorithm=algorithm)
    config.set_ignored_paths(**{"paths": ["model.sig"], "ignore_git_paths": False} | hashing_options)
    scratch = folder.with_name("scratch.sig")
    signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(config).sign(folder, scratch)
    scratch.rename(folder / "model.sig")


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_git_paths": True},
        {"paths": ["model.sig", "model.onnx"]},
        {"shards": 100_000},
        {"algorithm": "blake2"},
        {"algorithm": "blake3"},
    ],
    ids=str,
)
def test_a_trusted_signature_of_another_form_is_refused(
    write_release: WriteRelease, keys: Keys, options: dict[str, Any]
) -> None:
    folder = write_release(sign=False)
    _sign_with_library(folder, keys.private, **options)
    with pytest.raises(ReleaseError) as caught:
        load_release_dir(folder, trust=keys.trust)
    assert caught.value.step == "signature"
    assert "\n" not in str(caught.value)


def test_the_same_through_the_library_with_our_settings_loads(
    write_release: WriteRelease, keys: Keys
) -> None:
    folder = write_release(sign=False)
    _sign_with_library(folder, keys.private)
    assert load_release_dir(folder, trust=keys.trust).manifest.model == "tiny"


def test_a_trusted_signature_over_a_manifest_with_other_digests_is_refused(
    write_release: WriteRelease, keys: Keys
) -> None:
    folder = write_release(sign=False)
    lies = tiny_manifest(TINY_FILES | {"model.onnx": b"another"})
    (folder / "engine.json").write_bytes(encode_manifest(lies))
    _sign_with_library(folder, keys.private)
    with pytest.raises(ReleaseError, match=r"^manifest: .* of model\.onnx"):
        load_release_dir(folder, trust=keys.trust)


@pytest.mark.parametrize("name", [".gitignore", "a b", "-rf", "x" * 129])
def test_an_oddly_named_file_is_refused_even_if_signed(
    write_release: WriteRelease, keys: Keys, name: str
) -> None:
    folder = write_release(files=TINY_FILES | {name: b"x"}, sign=False)
    with pytest.raises(ReleaseError, match=r"^folder: expected file names of letters"):
        sign_release(folder, keys.private)
    _sign_with_library(folder, keys.private)
    with pytest.raises(ReleaseError, match=r"^folder: expected file names of letters"):
        load_release_dir(folder, trust=keys.trust)


@pytest.mark.parametrize("name", ["../evil.bin", "sub/evil.bin", "/etc/passwd", "..", "a\0b"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused_even_if_signed(
    write_release: WriteRelease, keys: Keys, tmp_path: Path, name: str
) -> None:
    folder = write_release(sign=False)
    (tmp_path / "evil.bin").write_bytes(b"x")
    for lies in (tiny_manifest(TINY_FILES | {name: b"x"}), tiny_manifest(TINY_FILES, graph=name)):
        (folder / "engine.json").write_bytes(encode_manifest(lies))
        _sign_with_library(folder, keys.private)
        with pytest.raises(ReleaseError, match=r"^(folder|manifest): expected .*, found ") as caught:
            load_release_dir(folder, trust=keys.trust)
        assert ascii(name) in str(caught.value)
