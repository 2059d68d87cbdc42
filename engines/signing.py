"""Sign a release with an EC key, and check such a signature: OpenSSF Model Signing bundles, offline.

Invariants
- The only module that knows the `model-signing` library, whose version is pinned: verification uses its
  verifier on bytes read once, because its own file check reopens every file by path and trusts the
  signature's list of exceptions.
- A verified signature names every file of the release but itself, by SHA-256; it can ignore nothing else.
- There is no weaker form to fall back to: older bundle formats are refused, never accepted with a warning.

`model_signing` is imported inside the functions that need it: it pulls in a third of a second of libraries,
which a process that only speaks to an engine elsewhere should not pay for.
"""

import hashlib
import os
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
from engines.new_file import NewFile, create_files, replace_file
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
    """Make a P-256 key pair in `folder`: (release.key with mode 0600, release.pub). Never replaces a key.

    ReleaseError if either half is there, or if the disk refuses; then neither is written.
    """
    private, public = folder / PRIVATE_KEY, folder / PUBLIC_KEY
    key = ec.generate_private_key(ec.SECP256R1())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    known = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_no_key(private, public)
        # the public half first: a kill between the two leaves the half that is worth nothing
        create_files([NewFile(public, known, 0o644), NewFile(private, secret, 0o600)])
    except OSError as error:
        found = error.strerror or str(error)
        raise ReleaseError("signing key", expected=f"to write to {folder}", found=found) from None
    return private, public


def _check_no_key(private: Path, public: Path) -> None:
    there = [path for path in (private, public) if os.path.lexists(path)]
    if not there:
        return
    expected = f"no {there[0]} yet"
    if len(there) == 1:
        found = f"half a pair: {there[0]} without {private if there[0] == public else public}"
        found += f" (bring the other half back, or move {there[0].name} away)"
    elif empty := [path for path in there if path.is_file() and path.stat().st_size == 0]:
        found = f"an incomplete pair: {empty[0]} is empty (delete both files and run this again)"
    else:
        found = "one (keys are never replaced)"
    raise ReleaseError("signing key", expected=expected, found=found)


def sign_release(release_dir: Path, private_key: Path) -> Path:
    """Write model.sig over every file of `release_dir` (an older one is replaced); its path.

    Refuses what the load chain would refuse later: links, subfolders, files that engine.json does not name or
    names with other digests. ReleaseError names the file.
    """
    expected = _described_digests(release_dir)
    bundle = _signed_bundle(release_dir, private_key)
    for name, digest in _statement(_parse_bundle(bundle).dsse_envelope.payload).items():
        if digest != expected.get(name):
            raise ReleaseError("digest", expected=f"SHA-256 {expected.get(name)} of {name}", found=digest)
    target = release_dir / SIGNATURE
    try:
        replace_file(NewFile(target, bundle, 0o644))
    except OSError as error:
        found = error.strerror or str(error)
        raise ReleaseError("signature", expected=f"to write {target}", found=found) from None
    return target


def _described_digests(release_dir: Path) -> dict[str, str]:
    """What engine.json says of every file, and its own digest; the folder must hold exactly these files."""
    with ReleaseFolder.open(release_dir) as folder:
        names = folder.files() - {SIGNATURE}
        if MANIFEST not in names:
            raise ReleaseError("manifest", expected=f"{MANIFEST} in {release_dir}", found="no such file")
        own = folder.read(MANIFEST, limit=MAX_MANIFEST_BYTES)
    files = parse_manifest(bytes(own.data)).files
    check_names(names - {MANIFEST}, files, by=MANIFEST)
    return {name: entry.sha256 for name, entry in files.items()} | {MANIFEST: own.sha256}


def _signed_bundle(release_dir: Path, private_key: Path) -> bytes:
    import model_signing

    library: Any = model_signing  # its constructors carry no annotations
    hashed = library.hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
    try:
        signer = library.signing.Config().use_elliptic_key_signer(private_key=private_key)
    except (OSError, ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        found = f"{private_key}: {shown(str(error))}"
        raise ReleaseError(
            "signing key", expected="an unencrypted EC private key in PEM", found=found
        ) from None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            written = Path(scratch) / SIGNATURE
            signer.set_hashing_config(hashed).sign(release_dir, written)
            return written.read_bytes()
    except OSError as error:
        found = f"{error.strerror or error} ({error.filename or 'temporary folder'})"
        raise ReleaseError("signature", expected=f"to read {release_dir}", found=found) from None


def verify_signature(bundle: bytes, keys: Iterable[Path]) -> Mapping[str, str]:
    """SHA-256 (hex) by name of every file that `bundle`, the content of model.sig, vouches for.

    ReleaseError (step "trust" or "signature") unless one of `keys` signed it.
    """
    from model_signing._signing import sign_ec_key, sign_sigstore_pb

    trusted = key_fingerprints(keys)
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
        raise ReleaseError(
            "signature", expected=f"a valid signature by key {hint[:16]}", found=found
        ) from None
    return _statement(parsed.dsse_envelope.payload)


def check_names(found: Iterable[str], expected: Iterable[str], *, by: str) -> None:
    """ReleaseError unless the folder's files are exactly those that `by` names."""
    extra, missing = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    if extra:
        raise ReleaseError("folder", expected=f"only files named by {by}", found=f"also {shown(extra[0])}")
    if missing:
        raise ReleaseError("folder", expected=f"every file named by {by}", found=f"no {shown(missing[0])}")


def key_fingerprints(keys: Iterable[Path]) -> dict[str, Path]:
    """Trusted key files by the hint that their signatures carry: SHA-256 of the public key in PEM."""
    trusted = {}
    for path in keys:
        try:
            key = load_pem_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            found = f"{path}: {error.strerror if isinstance(error, OSError) else 'something else'}"
            raise ReleaseError("trust", expected="a public key in PEM", found=found) from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
            raise ReleaseError(
                "trust", expected="an EC key on P-256, P-384 or P-521", found=f"{path}: another kind"
            )
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        trusted[hashlib.sha256(pem).hexdigest()] = path
    return trusted


def _parse_bundle(data: bytes) -> Any:
    """The Sigstore bundle in `data`, in the one form we take: key hint, one signature, DSSE envelope."""
    from sigstore_models.bundle.v1 import Bundle

    try:
        bundle = Bundle.from_json(data)
    except (ValueError, RecursionError):  # pydantic's errors quote the whole input
        raise ReleaseError("signature", expected="a Sigstore bundle", found="bytes that are none") from None
    key = bundle.verification_material.public_key
    if key is None or not key.hint:
        raise ReleaseError(
            "signature", expected="a bundle that names its key", found="another or an older form"
        )
    if bundle.dsse_envelope is None or len(bundle.dsse_envelope.signatures) != 1:
        raise ReleaseError("signature", expected="a DSSE envelope with one signature", found="another form")
    return bundle


def _statement(payload: bytes) -> dict[str, str]:
    """Digests by name in a signed payload; refuses forms and exceptions that the load chain does not know."""
    try:
        predicate = msgspec.json.decode(payload, type=_Statement).predicate
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ReleaseError(
            "signature", expected="a model signature v1.0 by files", found=str(error)
        ) from None
    ignored = set(predicate.serialization.ignore_paths) - {SIGNATURE}
    if ignored:
        raise ReleaseError(
            "signature", expected=f"nothing unsigned but {SIGNATURE}", found=f"{shown(min(ignored))} ignored"
        )
    digests = {resource.name: resource.digest for resource in predicate.resources}
    if len(digests) != len(predicate.resources):
        raise ReleaseError("signature", expected="each file signed once", found="a name that occurs twice")
    return digests
