"""Who may load a model may send files and settings along: none passes for a signed engine, nor for a node."""

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from backend.access import new_key
from engines import generate_signing_key
from engines.manifest import release_digest
from scripts.errors import TritonError
from tests.e2e.conftest import MODEL
from tests.e2e.guarded import RELEASE, Guarded, signed_copy
from tests.waiting import wait_until

Files = dict[str, bytes]

NONCE = os.urandom(8).hex()
"""Tells what these tests sent."""


@pytest.fixture(autouse=True, scope="module")
def serves_afterwards(guarded: Guarded) -> Iterator[None]:
    """After all that was tried, the repository's release can be loaded, and answers."""
    yield
    load_again(guarded)
    for config in Path("/tmp").glob("folder*/config.pbtxt"):  # Triton leaves what it refused
        if NONCE in config.read_text():
            shutil.rmtree(config.parent)


def load_again(guarded: Guarded) -> None:
    """What the repository holds."""
    guarded.triton.http.load(MODEL, limit_s=60)
    assert guarded.serves()


@pytest.fixture
def made(guarded: Guarded, tmp_path: Path) -> Callable[..., Path]:
    """Makes a release like the one that is served, but for what is said."""

    def make(*, private: Path | None = guarded.triton.home.private_key, **changes: object) -> Path:
        return signed_copy(guarded.release, tmp_path / os.urandom(4).hex(), private=private, **changes)

    return make


def load(guarded: Guarded, files: Mapping[str, bytes], *, model: str = MODEL, **settings: object) -> None:
    """Load with these files and parameters, and without the repository's, if there are files."""
    config = {
        "backend": "tensorcache",
        "metric_tags": {
            "nonce": f"{NONCE}-{os.urandom(4).hex()}"
        },  # an equal configuration would load nothing
        "parameters": {name: {"string_value": str(value)} for name, value in settings.items()},
    }
    uploads = {f"file:{name}": base64.b64encode(data).decode() for name, data in files.items()}
    guarded.triton.http.load(model, parameters={"config": json.dumps(config), **uploads}, limit_s=60)


def refusal(guarded: Guarded, files: Mapping[str, bytes], **settings: object) -> str:
    """Why it is refused; what served before serves meanwhile."""
    with pytest.raises(TritonError) as raised:
        load(guarded, files, **settings)
    assert guarded.serves()
    return str(raised.value)


def digest_of(release: Path) -> str:
    return str(release_digest((release / "engine.json").read_bytes()))


def uploaded(release: Path, *, current: str = "") -> Files:
    """A release as files of version 1. `current`: what is to serve, if not that."""
    digest = digest_of(release)
    files = {f"1/releases/{digest}/{path.name}": path.read_bytes() for path in release.iterdir()}
    return {**files, "1/current": (current or digest).encode() + b"\n"}


def release_of(answer: tuple[int, str]) -> str:
    status, text = answer
    assert status == 200, text
    return str(json.loads(text)["release"])


def test_a_signed_release_comes_in(guarded: Guarded, made: Callable[..., Path]) -> None:
    """Without this, what follows could be refused for any reason."""
    release = made(release=RELEASE + 1)
    load(guarded, uploaded(release))
    answer = guarded.generate(guarded.keys.credentials["reader-1"])
    assert release_of(answer) == digest_of(release)[:16] != guarded.digest[:16]
    load_again(guarded)


def test_an_unsigned_release_does_not(guarded: Guarded, made: Callable[..., Path]) -> None:
    assert "signature: expected model.sig" in refusal(guarded, uploaded(made(private=None)))


def test_a_release_with_another_byte_does_not(guarded: Guarded, made: Callable[..., Path]) -> None:
    files = uploaded(made())
    (name,) = [name for name in files if name.endswith("weights.bin")]
    data = bytearray(files[name])
    data[len(data) // 2] ^= 1
    assert "digest: expected SHA-256" in refusal(guarded, {**files, name: bytes(data)})


def test_a_release_with_another_file_does_not(guarded: Guarded, made: Callable[..., Path]) -> None:
    release = made()
    files = {**uploaded(release), f"1/releases/{digest_of(release)}/more.bin": b"x"}
    assert "more.bin" in refusal(guarded, files)


def test_a_release_of_another_key_does_not(
    guarded: Guarded, made: Callable[..., Path], tmp_path: Path
) -> None:
    other, public = generate_signing_key(tmp_path / "keys")
    files = uploaded(made(private=other))
    files |= {"1/keys/release.pub": public.read_bytes(), "1/release.pub": public.read_bytes()}
    assert "signature: expected" in refusal(guarded, files)


def test_a_release_that_was_signed_for_another_model_does_not(
    guarded: Guarded, made: Callable[..., Path]
) -> None:
    stolen = uploaded(made(model="another-model"))
    assert f"model: expected a release for '{MODEL}'" in refusal(guarded, stolen)


def test_an_older_release_does_not_nor_by_a_forged_history(
    guarded: Guarded, made: Callable[..., Path]
) -> None:
    old = made(release=RELEASE - 1)
    expected = f"min_release: expected release {RELEASE} or later"
    assert expected in refusal(guarded, uploaded(old))
    log, forged = guarded.triton.home.root / "triton.log", f"2026-01-01T00:00:00Z {digest_of(old)}\n"
    before = log.read_text().count(expected)
    refusal(guarded, {**uploaded(old, current="0" * 64), "1/history": forged.encode()})
    assert log.read_text().count(expected) > before, "what the history proposes is verified as well"


def test_current_names_no_other_place(guarded: Guarded, made: Callable[..., Path]) -> None:
    for current in (f"../{guarded.digest}", str(guarded.release)):
        assert "current: expected one line" in refusal(guarded, uploaded(made(), current=current))


def test_a_link_is_not_followed(guarded: Guarded) -> None:
    """Files that are sent cannot be links; who can write to the repository can make some."""
    real = guarded.triton.home.repository / MODEL / "1"
    version = guarded.triton.home.repository / "linked" / "1"
    version.mkdir(parents=True)
    try:
        shutil.copy(real.parent / "config.pbtxt", version.parent)
        shutil.copy(real / "current", version / "current")
        (version / "releases").symlink_to(real / "releases")
        with pytest.raises(TritonError, match="a symlink is none"):
            guarded.triton.http.load("linked", limit_s=60)
    finally:
        shutil.rmtree(version.parent)


def test_files_of_the_node_have_no_effect_among_those_of_a_model(
    guarded: Guarded, made: Callable[..., Path]
) -> None:
    credential, entry = new_key("intruder-1")
    acl = (
        f'[principals.intruder]\nmodels = ["*"]\nverbs = ["infer", "admin"]\n'
        f'[[principals.intruder.keys]]\nid = "intruder-1"\nsha256 = "{entry.sha256}"\n'
    ).encode()
    node = b'[access]\nacl = "acl.toml"\n[trust]\nkeys = ["keys/release.pub"]\n[secrets]\ndir = "secrets"\n'
    places = ("", "1/", "backend/", "1/backend/")
    more = {f"{place}{name}": text for place in places for name, text in
            {"acl.toml": acl, "tensorcache.toml": node, "secrets/naming.key": b"0" * 64,
             "model.py": b"raise SystemExit", "settings.py": b"raise SystemExit"}.items()}  # fmt: skip
    release = made(release=RELEASE + 1)
    load(guarded, {**uploaded(release), **more})
    assert release_of(guarded.generate(guarded.keys.credentials["reader-1"])) == digest_of(release)[:16]
    assert guarded.generate(credential)[0] == 400
    assert guarded.generate(None)[0] == 400
    load_again(guarded)


@pytest.mark.parametrize("key", ["secrets_dir", "acl", "min_release"])
def test_no_setting_of_a_model_is_one_of_the_node(guarded: Guarded, key: str) -> None:
    assert f"{key}: unknown key" in refusal(guarded, {}, **{key: "/tmp"})


def test_a_model_may_not_be_looked_at_less_often_than_its_node_wants(guarded: Guarded) -> None:
    load(guarded, {}, recheck_s=86_400, rehash_s=31_536_000)
    assert guarded.triton.metric("release_intact", model=MODEL) == 1
    weights = guarded.triton.home.repository / MODEL / "1" / "releases" / guarded.digest / "weights.bin"
    whole = weights.read_bytes()
    weights.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    try:
        wait_until(lambda: guarded.triton.metric("release_intact", model=MODEL) == 0, limit_s=10)
    finally:
        weights.write_bytes(whole)
        load_again(guarded)


def test_another_facade_lets_nobody_in_whom_its_decoder_does_not(guarded: Guarded) -> None:
    """The stranger may use models of the facade's name, and not the decoder."""
    known, stranger = (guarded.keys.credentials[key] for key in ("reader-1", "stranger-1"))
    load(guarded, {"1/empty": b""}, model="door", facade_for=MODEL)
    try:
        assert release_of(guarded.generate(known, model="door")) == guarded.digest[:16]
        for credential in (stranger, None):
            status, text = guarded.generate(credential, model="door")
            assert (status, "access denied" in text) == (400, True), text
    finally:
        guarded.triton.http.unload("door")
