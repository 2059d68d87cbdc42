"""model.sig: whatever its bytes, it vouches for what was signed or for nothing."""

import base64
import functools
import json
from pathlib import Path

from engines.errors import ReleaseError
from engines.manifest import encode_manifest
from engines.signing import generate_signing_key, sign_release, verify_signature
from tests.engines.conftest import tiny_manifest
from tests.fuzz.contract import plain, scratch

_FILES = {"model.onnx": b"graph", "tokenizer.json": b"{}"}


@functools.cache
def _signed() -> tuple[Path, bytes, dict[str, str]]:
    """A key, a bundle by it, and what that says."""
    release = scratch() / "signed"
    private, public = generate_signing_key(scratch() / "keys")
    release.mkdir()
    for name, data in _FILES.items():
        (release / name).write_bytes(data)
    (release / "engine.json").write_bytes(encode_manifest(tiny_manifest(_FILES)))
    bundle = sign_release(release, private).read_bytes()
    return public, bundle, dict(verify_signature(bundle, [public]))


def _altered() -> bytes:
    """The same signature over another digest."""
    bundle = json.loads(_signed()[1])
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    digest = _signed()[2]["model.onnx"].encode()
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload.replace(digest, b"0" * 64)).decode()
    return json.dumps(bundle).encode()


EXAMPLES = (
    _signed()[1],
    _altered(),
    json.dumps(json.loads(_signed()[1]) | {"mediaType": "x"}).encode(),
    b"[" * 20_000,
    b"{}",
)


def target(data: bytes) -> None:
    public, _, statement = _signed()
    try:
        vouched = verify_signature(data, [public])
    except ReleaseError as error:
        plain(error, begins=["signature: "])
        return
    assert dict(vouched) == statement, "a signature over something that was never signed"
