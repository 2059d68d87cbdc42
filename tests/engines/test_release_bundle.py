"""model.sig: every other form, content or signer than the one we take is refused in silence."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.manifest import encode_manifest
from engines.signing import sign_release, verify_signature
from tests.engines.conftest import TINY_FILES, Keys, refusal, tiny_manifest
from tests.engines.json_fuzz import JSON, json_paths

WriteRelease = Callable[..., Path]


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
    assert refusal(lambda: verify_signature(junk, [keys.public])).step == "signature"


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_bundle_with_any_part_replaced_is_refused(
    data: st.DataObject, keys: Keys, bundle: dict[str, Any]
) -> None:
    altered = json.loads(json.dumps(bundle))
    path = data.draw(st.sampled_from(json_paths(altered)))
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
