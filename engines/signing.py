"""Sign a release with an EC key, and check such a signature: OpenSSF Model Signing bundles, offline.

Invariants
- The only module that knows the `model-signing` library, whose version is pinned: verification uses its verifier on
  bytes read once, because its own file check reopens every file by path and trusts the signature's list of exceptions.
- A verified signature names every file of the release but itself, by SHA-256; it can ignore nothing else.
- There is no weaker form to fall back to: older bundle formats are refused, never accepted with a warning.

`model_signing` is imported inside the functions that need it: it pulls in a third of a second of libraries, which a
process that only speaks to an engine elsewhere should not pay for.
"""

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

from engines.errors import ReleaseError
from engines.manifest import MANIFEST, SIGNATURE, parse_manifest
from engines.release_folder import ReleaseFolder, shown

PRIVATE_KEY = "release.key"
PUBLIC_KEY = "release.pub"
MAX_MANIFEST_BYTES = 4 << 20
MAX_SIGNATURE_BYTES = 4 << 20
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


class _Serialization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    method: Literal["files"]
    hash_type: Literal["sha256"]
    allow_symlinks: bool  # says how the signer walked the folder; the load chain never follows one
    ignore_paths: tuple[str, ...] = ()


class _Resource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    algorithm: Literal["sha256"]
    digest: str


class _Predicate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    serialization: _Serialization
    resources: tuple[_Resource, ...]


class _Statement(msgspec.Struct, frozen=True, rename={"type": "_type", "predicate_type": "predicateType"}):
    """The signed in-toto statement: version 1.0 of the model signature, by files, with SHA-256."""

    type: Literal["https://in-toto.io/Statement/v1"]
    predicate_type: Literal["https://model_signing/signature/v1.0"]
    predicate: _Predicate


def generate_signing_key(folder: Path) -> tuple[Path, Path]:
    """Make a P-256 key pair in `folder`: (release.key with mode 0600, release.pub). Never overwrites a key."""
    folder.mkdir(parents=True, exist_ok=True)
    private, public = folder / PRIVATE_KEY, folder / PUBLIC_KEY
    key = ec.generate_private_key(ec.SECP256R1())
    _create(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _create(public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)
    return private, public


def sign_release(release_dir: Path, private_key: Path) -> Path:
    """Write model.sig over every file of `release_dir` (an older one is replaced); its path.

    Refuses what the load chain would refuse later: links, subfolders, files that engine.json does not name or names
    with other digests. ReleaseError names the file.
    """
    from model_signing import hashing, signing

    with ReleaseFolder.open(release_dir) as folder:
        names = folder.files() - {SIGNATURE}
        if MANIFEST not in names:
            raise ReleaseError("manifest", expected=f"{MANIFEST} in {release_dir}", found="no such file")
        manifest_file = folder.read(MANIFEST, limit=MAX_MANIFEST_BYTES)
    expected = {MANIFEST: manifest_file.sha256}
    expected |= {name: entry.sha256 for name, entry in parse_manifest(bytes(manifest_file.data)).files.items()}
    check_names(names - {MANIFEST}, expected.keys() - {MANIFEST}, by=MANIFEST)

    ignored = hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / SIGNATURE
        try:
            config = signing.Config().use_elliptic_key_signer(private_key=private_key)
            config.set_hashing_config(ignored).sign(release_dir, written)
        except (OSError, ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
            found = f"{private_key}: {shown(str(error))}"
            raise ReleaseError("signing key", expected="an unencrypted EC private key in PEM", found=found) from None
        bundle = written.read_bytes()
    signed = _statement(_parse_bundle(bundle).dsse_envelope.payload)
    for name, digest in signed.items():
        if digest != expected.get(name):
            raise ReleaseError("digest", expected=f"SHA-256 {expected.get(name)} of {name}", found=digest)
    return _replace(release_dir / SIGNATURE, bundle)


def verify_signature(bundle: bytes, keys: Iterable[Path]) -> Mapping[str, str]:
    """SHA-256 (hex) by name of every file that `bundle`, the content of model.sig, vouches for.

    ReleaseError (step "trust" or "signature") unless one of `keys` signed it.
    """
    from model_signing._signing import sign_ec_key, sign_sigstore_pb

    trusted = _fingerprints(keys)
    parsed = _parse_bundle(bundle)
    hint = parsed.verification_material.public_key.hint
    if hint not in trusted:
        known = ", ".join(sorted(name[:16] for name in trusted))
        raise ReleaseError(
            "signature", expected=f"a signature by a trusted key ({known})", found=f"key {shown(hint[:16])}"
        )
    try:
        sign_ec_key.Verifier(trusted[hint]).verify(sign_sigstore_pb.Signature(parsed))
    except (InvalidSignature, ValueError, KeyError, TypeError) as error:
        found = shown(str(error)) if str(error) else "one that does not belong to its content"
        raise ReleaseError("signature", expected=f"a valid signature by key {hint[:16]}", found=found) from None
    return _statement(parsed.dsse_envelope.payload)


def check_names(found: Iterable[str], expected: Iterable[str], *, by: str) -> None:
    """ReleaseError unless the folder's files are exactly those that `by` names."""
    extra, missing = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    if extra:
        raise ReleaseError("folder", expected=f"only files named by {by}", found=f"also {shown(extra[0])}")
    if missing:
        raise ReleaseError("folder", expected=f"every file named by {by}", found=f"no {shown(missing[0])}")


def _fingerprints(keys: Iterable[Path]) -> dict[str, Path]:
    """Trusted key files by the hint that their signatures carry: SHA-256 of the public key in PEM."""
    trusted = {}
    for path in keys:
        try:
            key = load_pem_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            found = f"{path}: {error.strerror if isinstance(error, OSError) else 'something else'}"
            raise ReleaseError("trust", expected="a public key in PEM", found=found) from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
            raise ReleaseError("trust", expected="an EC key on P-256, P-384 or P-521", found=f"{path}: another kind")
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        trusted[hashlib.sha256(pem).hexdigest()] = path
    return trusted


def _parse_bundle(data: bytes) -> Any:
    """The Sigstore bundle in `data`, in the one form we take: a key's hint, one signature, a DSSE envelope."""
    from sigstore_models.bundle.v1 import Bundle

    try:
        bundle = Bundle.from_json(data)
    except (ValueError, RecursionError):  # pydantic's errors quote the whole input
        raise ReleaseError("signature", expected="a Sigstore bundle", found="bytes that are none") from None
    key = bundle.verification_material.public_key
    if key is None or not key.hint:
        raise ReleaseError("signature", expected="a bundle that names its key", found="another or an older form")
    if bundle.dsse_envelope is None or len(bundle.dsse_envelope.signatures) != 1:
        raise ReleaseError("signature", expected="a DSSE envelope with one signature", found="another form")
    return bundle


def _statement(payload: bytes) -> dict[str, str]:
    """Digests by name in a signed payload; refuses forms and exceptions that the load chain does not know."""
    try:
        predicate = msgspec.json.decode(payload, type=_Statement).predicate
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ReleaseError("signature", expected="a model signature v1.0 by files", found=str(error)) from None
    ignored = set(predicate.serialization.ignore_paths) - {SIGNATURE}
    if ignored:
        raise ReleaseError(
            "signature", expected=f"nothing unsigned but {SIGNATURE}", found=f"{shown(min(ignored))} ignored"
        )
    digests = {resource.name: resource.digest for resource in predicate.resources}
    if len(digests) != len(predicate.resources):
        raise ReleaseError("signature", expected="each file signed once", found="a name that occurs twice")
    return digests


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise ReleaseError("signing key", expected=f"no {path} yet", found="one (keys are never replaced)") from None
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, data: bytes) -> Path:
    """Put `data` at `path` whole or not at all."""
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    _create(scratch, data, 0o644)
    os.replace(scratch, path)
    return path
