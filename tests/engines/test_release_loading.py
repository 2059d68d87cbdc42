"""The load chain: what it hands out, and that each link refuses with one line: expected and found."""

import base64
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import loading
from engines.errors import ReleaseError
from engines.loading import current_digest, load_release, load_release_dir
from engines.manifest import encode_manifest, parse_manifest
from engines.signing import sign_release
from engines.trust import TrustSettings
from tests.engines.conftest import TINY_FILES, Keys, tiny_manifest

WriteRelease = Callable[..., Path]


def refusal(call: Callable[[], object]) -> ReleaseError:
    with pytest.raises(ReleaseError) as caught:
        call()
    error = caught.value
    assert "\n" not in str(error)
    assert str(error) == f"{error.step}: expected {error.expected}, found {error.found}"
    assert error.expected
    assert error.found
    return error


def publish_by_hand(release: Path, version: Path) -> str:
    digest = hashlib.sha256((release / "engine.json").read_bytes()).hexdigest()
    shutil.copytree(release, version / "releases" / digest, symlinks=True)
    (version / "current").write_text(digest + "\n")
    return digest


@pytest.fixture
def version(tmp_path: Path, write_release: WriteRelease) -> Path:
    """A version folder that serves a tiny release."""
    folder = tmp_path / "repo" / "tiny" / "1"
    publish_by_hand(write_release(), folder)
    return folder


@pytest.fixture
def load(version: Path, keys: Keys) -> Callable[[], object]:
    return lambda: load_release(version, model="tiny", trust=keys.trust)


@pytest.fixture
def served(version: Path) -> Path:
    return version / "releases" / (version / "current").read_text().strip()


def test_a_sound_release_loads_as_bytes_in_memory(version: Path, served: Path, keys: Keys) -> None:
    release = load_release(version, model="tiny", trust=keys.trust)
    assert release.manifest == tiny_manifest(TINY_FILES)
    assert release.digest == served.name == current_digest(version)
    assert release.path == served
    assert {name: bytes(data) for name, data in release.files.items()} == {
        path.name: path.read_bytes() for path in served.iterdir()
    }
    for data in release.files.values():
        assert data.readonly


def test_a_release_that_is_not_published_loads_too(write_release: WriteRelease, keys: Keys) -> None:
    folder = write_release()
    assert load_release_dir(folder, trust=keys.trust).manifest.model == "tiny"
    assert load_release_dir(folder, model="tiny", trust=keys.trust).path == folder


def test_any_of_several_trusted_keys_will_do(version: Path, keys: Keys, other_keys: Keys) -> None:
    trust = TrustSettings(keys=(other_keys.public, keys.public))
    assert load_release(version, model="tiny", trust=trust).manifest.release == 3


def test_a_hard_link_is_a_regular_file(served: Path, load: Callable[[], object]) -> None:
    os.link(served / "model.onnx", served.parent.parent / "also")
    assert load() is not None


# --- trust
# -----------------------------------------------------------------------------------------------------


def test_without_keys_everything_is_refused(version: Path) -> None:
    error = refusal(lambda: load_release(version, model="tiny", trust=TrustSettings()))
    assert error.step == "trust"
    assert "none: no release can load" in error.found


def test_an_unknown_key_is_refused(version: Path, other_keys: Keys) -> None:
    error = refusal(lambda: load_release(version, model="tiny", trust=other_keys.trust))
    assert error.step == "signature"
    assert "trusted key" in error.expected


def test_a_key_file_that_is_none_is_refused(version: Path, tmp_path: Path, keys: Keys) -> None:
    junk = tmp_path / "junk.pub"
    junk.write_bytes(b"\x89PNG\r\n")
    for path in (junk, tmp_path / "missing.pub", keys.private):
        error = refusal(
            lambda path=path: load_release(version, model="tiny", trust=TrustSettings(keys=(path,)))
        )
        assert error.step == "trust"
        assert str(path) in error.found


# --- current
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"../../../../etc",
        b"../" * 21 + b"\n",
        b"a" * 63 + b"\n",
        b"a" * 65 + b"\n",
        b"A" * 64 + b"\n",
        b"a" * 64 + b"\n\n",
        b"a" * 64 + b"\r\n",
        b" " + b"a" * 63,
        b"a" * 64 + b"\nb",
        b"\0" * 64,
        b"a" * 63 + b"\0",
        b"\xff\xfe" * 32,
        "ａ".encode() * 21,
    ],
)
def test_current_must_be_a_digest(version: Path, load: Callable[[], object], content: bytes) -> None:
    (version / "current").write_bytes(content)
    assert refusal(load).step == "current"


def test_a_huge_current_is_not_read(version: Path, load: Callable[[], object]) -> None:
    with (version / "current").open("r+b") as file:
        file.truncate(1 << 40)
    error = refusal(load)
    assert error.step == "current"
    assert "at most 128 bytes" in error.expected


def test_current_without_its_newline_is_fine(version: Path, load: Callable[[], object], served: Path) -> None:
    (version / "current").write_text(served.name)
    assert load() is not None


def test_a_missing_current_says_how_to_publish(version: Path, load: Callable[[], object]) -> None:
    (version / "current").unlink()
    error = refusal(load)
    assert error.step == "current"
    assert "tensorcache deploy" in error.found


def test_current_as_symlink_folder_or_fifo_is_refused(version: Path, load: Callable[[], object]) -> None:
    current = version / "current"
    for make in (lambda: current.symlink_to(version / "real"), current.mkdir, lambda: os.mkfifo(current)):
        shutil.rmtree(current) if current.is_dir() else current.rename(version / "real")
        make()
        assert refusal(load).step == "current"


def test_current_that_names_no_release_is_refused(version: Path, load: Callable[[], object]) -> None:
    (version / "current").write_text("a" * 64 + "\n")
    assert refusal(load).step == "folder"


# --- folder
# ----------------------------------------------------------------------------------------------------


def test_the_release_folder_or_releases_as_symlink_is_refused(
    version: Path, served: Path, load: Callable[[], object]
) -> None:
    real = served.rename(version / "elsewhere")
    served.symlink_to(real)
    assert refusal(load).step == "folder"
    served.unlink()
    real.rename(served)
    releases = (version / "releases").rename(version / "moved")
    (version / "releases").symlink_to(releases)
    assert refusal(load).step == "folder"


def test_a_missing_version_folder_is_refused(tmp_path: Path, keys: Keys) -> None:
    for path in (tmp_path / "nothing", tmp_path / "a\0b"):
        error = refusal(lambda path=path: load_release(path, model="tiny", trust=keys.trust))
        assert error.step == "folder"


@pytest.mark.parametrize(
    "name", ["extra.bin", ".gitignore", ".gitattributes", "new\nline", "ü", "model.sig.bak"]
)
def test_an_extra_file_is_refused(served: Path, load: Callable[[], object], name: str) -> None:
    (served / name).write_text("*")
    error = refusal(load)
    assert error.step == "folder"
    assert ascii(name) in error.found


@pytest.mark.parametrize("name", ["sub", ".git", ".github"])
def test_a_subfolder_is_refused_even_an_empty_one(
    served: Path, load: Callable[[], object], name: str
) -> None:
    (served / name).mkdir()
    error = refusal(load)
    assert error.step == "folder"
    assert f"the folder {name!r}" in error.found


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
def test_a_missing_file_is_refused(served: Path, load: Callable[[], object], name: str) -> None:
    (served / name).unlink()
    error = refusal(load)
    assert error.step == "folder"
    assert name in error.found


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json", "model.sig"])
@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_only_regular_files_are_read(
    served: Path, tmp_path: Path, load: Callable[[], object], name: str, kind: str
) -> None:
    real = (served / name).rename(tmp_path / "real")
    if kind == "symlink":
        (served / name).symlink_to(real)
    elif kind == "fifo":
        os.mkfifo(served / name)
    else:
        (served / name).mkdir()
    error = refusal(load)
    assert error.step == "folder"
    assert kind in error.found.lower()


# --- signature
# -------------------------------------------------------------------------------------------------


def test_an_unsigned_release_says_how_to_sign(served: Path, load: Callable[[], object]) -> None:
    (served / "model.sig").unlink()
    error = refusal(load)
    assert error.step == "signature"
    assert "tensorcache sign" in error.found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG\r\n\x1a\n" + bytes(64),
        b"{}",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff" * 100,
        b"1" * 5000,
    ],
)
def test_a_signature_that_is_none_is_refused(
    served: Path, load: Callable[[], object], content: bytes
) -> None:
    (served / "model.sig").write_bytes(content)
    assert refusal(load).step == "signature"


def test_a_huge_signature_is_not_read(served: Path, load: Callable[[], object]) -> None:
    with (served / "model.sig").open("r+b") as file:
        file.truncate(1 << 40)
    assert "at most" in refusal(load).expected


def test_a_truncated_signature_is_refused(served: Path, load: Callable[[], object]) -> None:
    whole = (served / "model.sig").read_bytes()
    for length in (1, 100, len(whole) // 2, len(whole) - 1):
        (served / "model.sig").write_bytes(whole[:length])
        assert refusal(load).step == "signature"


def test_every_altered_bit_of_the_signed_payload_is_refused(served: Path, load: Callable[[], object]) -> None:
    bundle = json.loads((served / "model.sig").read_text())
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    for at in (0, 1, len(payload) // 2, len(payload) - 1):
        altered = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(altered).decode()
        (served / "model.sig").write_text(json.dumps(bundle))
        error = refusal(load)
        assert error.step == "signature"
        assert "valid signature" in error.expected


def _without_hint(bundle: dict[str, Any]) -> None:
    del bundle["verificationMaterial"]["publicKey"]["hint"]


def _null_hint(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"]["publicKey"]["hint"] = None


def _empty_hint(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"]["publicKey"]["hint"] = ""


def _two_signatures(bundle: dict[str, Any]) -> None:
    bundle["dsseEnvelope"]["signatures"] *= 2


def _no_signature(bundle: dict[str, Any]) -> None:
    bundle["dsseEnvelope"]["signatures"] = []


def _other_payload_type(bundle: dict[str, Any]) -> None:
    bundle["dsseEnvelope"]["payloadType"] = "text/plain"


def _certificate(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"] = {"certificate": {"rawBytes": "AA=="}, "tlogEntries": []}


def _older_media_type(bundle: dict[str, Any]) -> None:
    bundle["mediaType"] = "application/vnd.dev.sigstore.bundle+json;version=0.1"


def _unknown_field(bundle: dict[str, Any]) -> None:
    bundle["more"] = 1


def _message_signature(bundle: dict[str, Any]) -> None:
    del bundle["dsseEnvelope"]
    bundle["messageSignature"] = {
        "messageDigest": {"algorithm": "SHA2_256", "digest": "AA=="},
        "signature": "AA==",
    }


@pytest.mark.parametrize(
    "change",
    [
        _without_hint,
        _null_hint,
        _empty_hint,
        _two_signatures,
        _no_signature,
        _other_payload_type,
        _certificate,
        _older_media_type,
        _unknown_field,
        _message_signature,
    ],
)
def test_other_forms_of_a_bundle_are_refused_in_silence(
    served: Path, load: Callable[[], object], capfd: pytest.CaptureFixture[str], change: Callable[[Any], None]
) -> None:
    bundle = json.loads((served / "model.sig").read_text())
    change(bundle)
    (served / "model.sig").write_text(json.dumps(bundle))
    assert refusal(load).step == "signature"
    assert capfd.readouterr() == ("", "")


def test_the_signature_of_another_release_is_refused(
    served: Path, load: Callable[[], object], write_release: WriteRelease
) -> None:
    other = write_release("other", release=4)
    shutil.copy(other / "model.sig", served / "model.sig")
    error = refusal(load)
    assert error.step == "digest"
    assert "engine.json" in error.expected


@given(junk=st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_no_signature(junk: bytes, keys: Keys) -> None:
    from engines.signing import verify_signature

    assert refusal(lambda: verify_signature(junk, [keys.public])).step == "signature"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_bundle_with_any_part_replaced_is_refused(
    data: st.DataObject, keys: Keys, bundle: dict[str, Any]
) -> None:
    from engines.signing import verify_signature

    altered = json.loads(json.dumps(bundle))
    path = data.draw(st.sampled_from(_paths(altered)))
    *parents, last = path
    part = altered
    for step in parents:
        part = part[step]
    value = data.draw(JSON.filter(lambda value: value != part[last]))
    # keyid is a remark that no verifier reads; everything else is part of what is checked
    if last == "keyid" and (value is None or isinstance(value, str)):
        return
    if last == "tlogEntries" and value == []:
        return
    part[last] = value
    assert refusal(lambda: verify_signature(json.dumps(altered).encode(), [keys.public])).step == "signature"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("signed")
    for name, content in TINY_FILES.items():
        (folder / name).write_bytes(content)
    (folder / "engine.json").write_bytes(encode_manifest(tiny_manifest(TINY_FILES)))
    content = json.loads(sign_release(folder, keys.private).read_text())
    assert isinstance(content, dict)
    return content


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for step, part in steps for path in [(*prefix, step), *_paths(part, (*prefix, step))]]


# --- bytes
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_altered_byte_is_refused(served: Path, load: Callable[[], object], name: str, where: str) -> None:
    content = bytearray((served / name).read_bytes())
    content[{"first": 0, "middle": len(content) // 2, "last": -1}[where]] ^= 1
    (served / name).write_bytes(content)
    error = refusal(load)
    assert error.step == "digest"
    assert name in error.expected
    assert re.search("[0-9a-f]{64}", error.expected)
    assert error.found == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + bytes(32)], ids=["empty", "png"])
def test_other_content_is_refused(
    served: Path, load: Callable[[], object], name: str, content: bytes
) -> None:
    (served / name).write_bytes(content)
    assert name in refusal(load).expected


@pytest.mark.parametrize("name", [*TINY_FILES, "engine.json"])
def test_a_truncated_or_longer_file_is_refused(served: Path, load: Callable[[], object], name: str) -> None:
    whole = (served / name).read_bytes()
    for content in (whole[:-1], whole + b"\0", whole * 2):
        (served / name).write_bytes(content)
        assert name in refusal(load).expected


def test_a_manifest_with_carriage_returns_is_refused(served: Path, load: Callable[[], object]) -> None:
    manifest = served / "engine.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"\n", b"\r\n"))
    error = refusal(load)
    assert error.step == "digest"
    assert "engine.json" in error.expected


def test_a_sparse_file_of_another_size_is_not_read(served: Path, load: Callable[[], object]) -> None:
    with (served / "model.onnx.data").open("r+b") as file:
        file.truncate(1 << 42)
    error = refusal(load)
    assert error.expected == f"{len(TINY_FILES['model.onnx.data'])} bytes in model.onnx.data"
    assert error.found == f"{1 << 42} bytes"


# --- what the release says about itself
# --------------------------------------------------------------------------


def test_a_release_in_a_folder_of_another_name_is_refused(
    version: Path, served: Path, load: Callable[[], object]
) -> None:
    served.rename(served.with_name("b" * 64))
    (version / "current").write_text("b" * 64 + "\n")
    error = refusal(load)
    assert error.step == "digest"
    assert error.expected == "release " + "b" * 64
    assert error.found.startswith(served.name)


def test_another_model_is_refused(version: Path, keys: Keys) -> None:
    error = refusal(lambda: load_release(version, model="huge", trust=keys.trust))
    assert (error.step, error.expected, error.found) == ("model", "a release for 'huge'", "one for 'tiny'")


def test_an_older_release_than_trusted_is_refused_before_it_is_read(
    version: Path, served: Path, keys: Keys
) -> None:
    (served / "model.onnx.data").write_bytes(b"not even looked at")
    trust = TrustSettings(keys=(keys.public,), min_release={"tiny": 4, "huge": 1})
    error = refusal(lambda: load_release(version, model="tiny", trust=trust))
    assert (error.step, error.expected, error.found) == ("min_release", "release 4 or later of 'tiny'", "3")


def test_the_least_trusted_release_loads(version: Path, keys: Keys) -> None:
    trust = TrustSettings(keys=(keys.public,), min_release={"tiny": 3, "huge": 9})
    assert load_release(version, model="tiny", trust=trust).manifest.release == 3


def test_too_little_memory_is_refused_before_it_is_read(version: Path, served: Path, keys: Keys) -> None:
    (served / "model.onnx.data").write_bytes(b"not even looked at")
    need = sum(map(len, TINY_FILES.values()))
    error = refusal(lambda: load_release(version, model="tiny", trust=keys.trust, available=lambda: need - 1))
    assert error.step == "memory"
    assert f"{need} bytes" in error.expected
    assert error.found == f"{need - 1} bytes"


def test_a_tokenizer_that_the_kv_was_not_made_for_is_refused(write_release: WriteRelease, keys: Keys) -> None:
    folder = write_release(tokenizer_digest="0" * 64)
    error = refusal(lambda: load_release_dir(folder, trust=keys.trust))
    assert error.step == "tokenizer"


@pytest.mark.parametrize("name", ["tokenizer.json", "model.onnx"])
def test_a_release_without_a_needed_file_is_refused(
    write_release: WriteRelease, keys: Keys, name: str
) -> None:
    folder = write_release(files={file: data for file, data in TINY_FILES.items() if file != name})
    error = refusal(lambda: load_release_dir(folder, trust=keys.trust))
    assert error.step == "manifest"
    assert name in error.expected


# --- engine.json
# ---------------------------------------------------------------------------------------------------

MANIFEST: dict[str, Any] = json.loads(encode_manifest(tiny_manifest(TINY_FILES)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "tensorcache-engine/2"),
        ("release", -1),
        ("release", 1.5),
        ("release", True),
        ("release", "3"),
        ("lanes", 0),
        ("lanes", 10**30),
        ("model", "../tiny"),
        ("model", "tiny\n"),
        ("model", ""),
        ("runtime", "torch"),
        ("kv_layout", "paged"),
        ("kv_dtype", "int8"),
        ("kv_identity", "0" * 31),
        ("tokenizer_digest", "x" * 64),
        ("files", []),
        ("files", {"model.onnx": {"sha256": "0" * 64, "size": -1}}),
        ("geometry", None),
        ("golden", {"prompt": [1], "token": 1}),
        ("golden", {"prompt": ["a"], "token": 1, "margin": 1}),
        ("chat_template", 7),
        ("unknown", 1),
    ],
)
def test_a_manifest_names_the_field_that_is_wrong(field: str, value: object) -> None:
    error = refusal(lambda: parse_manifest(json.dumps(MANIFEST | {field: value}).encode()))
    assert error.step == "manifest"
    assert field in error.found


@pytest.mark.parametrize("field", sorted(MANIFEST.keys() - {"tensorrt"}))
def test_a_manifest_names_the_field_that_is_missing(field: str) -> None:
    without = {name: value for name, value in MANIFEST.items() if name != field}
    assert f"`{field}`" in refusal(lambda: parse_manifest(json.dumps(without).encode())).found


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_manifest_with_any_part_replaced_parses_or_is_refused(data: st.DataObject) -> None:
    altered = json.loads(json.dumps(MANIFEST))
    *parents, last = data.draw(st.sampled_from(_paths(altered)))
    part = altered
    for step in parents:
        part = part[step]
    part[last] = data.draw(JSON)
    raw = json.dumps(altered).encode()
    try:
        manifest = parse_manifest(raw)
    except ReleaseError:
        assert refusal(lambda: parse_manifest(raw)).step == "manifest"
    else:
        assert parse_manifest(encode_manifest(manifest)) == manifest


@given(junk=st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_no_manifest(junk: bytes) -> None:
    assert refusal(lambda: parse_manifest(junk)).step == "manifest"


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"model":' * 50_000, b'{"format": "\xff"}', b"\xef\xbb\xbf{}"]
)
def test_hostile_json_is_no_manifest(raw: bytes) -> None:
    assert refusal(lambda: parse_manifest(raw)).step == "manifest"


# --- the bytes loaded are the bytes verified
# -----------------------------------------------------------------------


def test_a_file_replaced_after_loading_changes_nothing(version: Path, served: Path, keys: Keys) -> None:
    release = load_release(version, model="tiny", trust=keys.trust)
    for path in served.iterdir():
        path.write_bytes(b"evil" * 1000)
    for name, content in TINY_FILES.items():
        assert bytes(release.files[name]) == content


@pytest.mark.parametrize("how", ["replaced", "overwritten", "linked"])
def test_a_file_replaced_between_check_and_use_is_caught(
    served: Path, load: Callable[[], object], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker strikes after listing and signature were checked, just before the file is opened."""
    target, evil = served / "model.onnx.data", served.parent / "evil"
    evil.write_bytes(b"x" * len(TINY_FILES["model.onnx.data"]))
    require_memory = loading.require_memory

    def strike(*args: Any, **kwargs: Any) -> None:
        require_memory(*args, **kwargs)
        if how == "replaced":
            os.replace(evil, target)
        elif how == "overwritten":
            target.write_bytes(evil.read_bytes())
        else:
            target.unlink()
            target.symlink_to(evil)

    monkeypatch.setattr(loading, "require_memory", strike)
    assert refusal(load).step == ("files" if how == "linked" else "digest")


def test_a_file_that_flips_all_the_time_loads_right_or_not_at_all(
    version: Path, served: Path, keys: Keys
) -> None:
    target, scratch = served / "model.onnx.data", version / "scratch"
    good = TINY_FILES["model.onnx.data"]
    stop = threading.Event()

    def flip() -> None:
        contents = [b"y" * len(good), good]
        turn = 0
        while not stop.is_set():
            scratch.write_bytes(contents[turn % 2])
            os.replace(scratch, target)
            with target.open("r+b") as file:  # in place, too
                file.write(contents[turn % 2][: len(good) // 2])
            turn += 1

    attacker = threading.Thread(target=flip)
    attacker.start()
    outcomes = set()
    try:
        for _ in range(150):
            try:
                release = load_release(version, model="tiny", trust=keys.trust)
            except ReleaseError as error:
                outcomes.add(error.step)
            else:
                assert bytes(release.files["model.onnx.data"]) == good
                outcomes.add("loaded")
    finally:
        stop.set()
        attacker.join()
    assert outcomes <= {"loaded", "digest", "files"}
    assert "digest" in outcomes


# --- nothing is left behind
# ----------------------------------------------------------------------------------------


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_fifty_failed_loads_leak_neither_files_nor_memory(write_release: WriteRelease, keys: Keys) -> None:
    files = TINY_FILES | {"zz.data": bytes(16 << 20)}  # the last one is read in full, then refused
    folder = write_release(files=files)
    (folder / "zz.data").write_bytes(b"\1" + bytes((16 << 20) - 1))

    def fail() -> None:
        assert refusal(lambda: load_release_dir(folder, trust=keys.trust)).step == "digest"

    fail()
    fds, memory = len(os.listdir("/proc/self/fd")), _resident_bytes()
    for _ in range(50):
        fail()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert _resident_bytes() - memory < 40 << 20  # 50 leaked ones would be 800 MB


def test_a_refusal_that_somebody_keeps_does_not_keep_the_bytes(
    write_release: WriteRelease, keys: Keys
) -> None:
    folder = write_release(files=TINY_FILES | {"zz.data": bytes(64 << 20)})
    (folder / "zz.data").write_bytes(b"\1" + bytes((64 << 20) - 1))
    memory = _resident_bytes()
    kept = [refusal(lambda: load_release_dir(folder, trust=keys.trust)) for _ in range(4)]
    assert _resident_bytes() - memory < 60 << 20
    assert len(kept) == 4


def test_failures_at_every_link_leave_no_file_open(
    version: Path, served: Path, load: Callable[[], object], keys: Keys
) -> None:
    load()
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ReleaseError):
        load_release(version, model="other", trust=keys.trust)
    for name in ("model.onnx", "engine.json", "model.sig"):
        (served / name).write_bytes(b"")
        with pytest.raises(ReleaseError):
            load()
    (version / "current").write_bytes(b"")
    with pytest.raises(ReleaseError):
        load()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_settings_refuse_unknown_keys() -> None:
    with pytest.raises(msgspec.ValidationError, match="unsafe"):
        msgspec.convert({"unsafe": True}, TrustSettings)
