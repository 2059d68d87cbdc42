"""Load a release: every check, in order, before a byte of it is believed.

The chain; each link refuses with one line (ReleaseError: step, expected, found) before the next one begins:

    trust       there is a key to trust
    current     `<version>/current` is one line that names a release                   (published ones)
    folder      a flat folder of plainly named regular files, no links
    signature   model.sig, read once, was made by a trusted key and leaves nothing out but itself
    folder      the folder holds exactly the signed files
    digest      engine.json has the signed digest
    manifest    engine.json is well-formed and names the other files with the signed digests
    digest      the folder's name is the release's digest                              (published ones)
    model       the release was signed for this model
    min_release it is not older than the trust settings allow
    memory      the host has room for its bytes
    digest      every file, read once into private memory, has the signed digest
    tokenizer   tokenizer.json is the one that the release's KV was computed for

What comes out is the only thing that engines are opened from: bytes in memory, never paths.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engines.errors import ReleaseError
from engines.host_memory import AvailableMemory, available_bytes, require_memory
from engines.manifest import MANIFEST, SIGNATURE, EngineManifest, parse_manifest, release_digest
from engines.release_folder import FileBytes, ReleaseFolder, shown
from engines.signing import MAX_MANIFEST_BYTES, MAX_SIGNATURE_BYTES, check_names, verify_signature
from engines.trust import TrustSettings

CURRENT = "current"
RELEASES = "releases"
TOKENIZER = "tokenizer.json"
_DIGEST = re.compile(rb"([0-9a-f]{64})\n?")


@dataclass(frozen=True, slots=True)
class VerifiedRelease:
    """A release that passed the chain. `files` holds the verified bytes of every file, model.sig included.

    The views are read-only, 64-byte aligned and backed by private memory; `path` says where they came from
    and is for messages only.
    """

    manifest: EngineManifest
    digest: str
    files: Mapping[str, memoryview]
    path: Path


def load_release(
    version_dir: Path, *, model: str, trust: TrustSettings, available: AvailableMemory = available_bytes
) -> VerifiedRelease:
    """Verify and read the release that `version_dir`/current names. ReleaseError if any check refuses."""
    _require_keys(trust)
    with ReleaseFolder.open(version_dir, follow=True) as version:
        digest = _read_current(version)
        with version.folder(RELEASES) as releases, releases.folder(digest) as folder:
            return _load(folder, model=model, trust=trust, available=available, digest=digest)


def load_release_dir(
    release_dir: Path,
    *,
    model: str | None = None,
    trust: TrustSettings,
    available: AvailableMemory = available_bytes,
) -> VerifiedRelease:
    """The same for a folder that is not published; `model` None takes the name that it was signed for."""
    _require_keys(trust)
    with ReleaseFolder.open(release_dir) as folder:
        return _load(folder, model=model, trust=trust, available=available, digest=None)


def current_digest(version_dir: Path) -> str:
    """The digest in `version_dir`/current: which release is meant to serve. ReleaseError if there is none."""
    with ReleaseFolder.open(version_dir, follow=True) as version:
        return _read_current(version)


def _require_keys(trust: TrustSettings) -> None:
    if not trust.keys:
        raise ReleaseError(
            "trust", expected="at least one trusted key (trust.keys)", found="none: no release can load"
        )


def _load(
    folder: ReleaseFolder,
    *,
    model: str | None,
    trust: TrustSettings,
    available: AvailableMemory,
    digest: str | None,
) -> VerifiedRelease:
    try:
        return _verify(folder, model=model, trust=trust, available=available, digest=digest)
    except ReleaseError as error:
        # A traceback keeps its frames alive, and they hold what was read so far: gigabytes, for as long as
        # somebody keeps the error. The text says it all.
        refused = error.with_traceback(None)
        refused.__context__ = None
    raise refused


def _verify(
    folder: ReleaseFolder,
    *,
    model: str | None,
    trust: TrustSettings,
    available: AvailableMemory,
    digest: str | None,
) -> VerifiedRelease:
    names = folder.files()
    if SIGNATURE not in names:
        found = "an unsigned release (sign it with `tensorcache sign`)"
        raise ReleaseError("signature", expected=f"{SIGNATURE} in {folder.path}", found=found)
    signature = folder.read(SIGNATURE, limit=MAX_SIGNATURE_BYTES)
    signed = verify_signature(bytes(signature.data), trust.keys)
    check_names(names - {SIGNATURE}, signed, by="the signature")

    description, manifest = _load_manifest(folder, signed)
    found_digest = release_digest(bytes(description.data))
    if digest is not None and found_digest != digest:
        raise ReleaseError("digest", expected=f"release {digest}", found=f"{found_digest} in its folder")
    _check_eligible(manifest, model=model, trust=trust)

    need = sum(entry.size for entry in manifest.files.values())
    require_memory(need, purpose="read the release", available=available)
    files = {MANIFEST: description.data, SIGNATURE: signature.data}
    for name, entry in manifest.files.items():
        file = folder.read(name, size=entry.size)
        _check_digest(name, file, signed[name])
        files[name] = file.data
        if name == TOKENIZER and file.sha256 != manifest.tokenizer_digest:
            raise ReleaseError(
                "tokenizer", expected=f"SHA-256 {manifest.tokenizer_digest}", found=file.sha256
            )
    return VerifiedRelease(manifest, found_digest, MappingProxyType(files), folder.path)


def _load_manifest(folder: ReleaseFolder, signed: Mapping[str, str]) -> tuple[FileBytes, EngineManifest]:
    if MANIFEST not in signed:
        raise ReleaseError("manifest", expected=f"{MANIFEST} in {folder.path}", found="no such file")
    file = folder.read(MANIFEST, limit=MAX_MANIFEST_BYTES)
    _check_digest(MANIFEST, file, signed[MANIFEST])
    manifest = parse_manifest(bytes(file.data))
    check_names(signed.keys() - {MANIFEST}, manifest.files, by=MANIFEST)
    for name, entry in manifest.files.items():
        if entry.sha256 != signed[name]:
            raise ReleaseError(
                "manifest", expected=f"the signed SHA-256 {signed[name]} of {name}", found=entry.sha256
            )
    for name in (manifest.graph, TOKENIZER):
        if name not in manifest.files:
            raise ReleaseError("manifest", expected=f"{shown(name)} among its files", found="no such file")
    return file, manifest


def _check_eligible(manifest: EngineManifest, *, model: str | None, trust: TrustSettings) -> None:
    if model is not None and manifest.model != model:
        raise ReleaseError(
            "model", expected=f"a release for {shown(model)}", found=f"one for {shown(manifest.model)}"
        )
    least = trust.min_release.get(manifest.model)
    if least is not None and manifest.release < least:
        raise ReleaseError(
            "min_release",
            expected=f"release {least} or later of {shown(manifest.model)}",
            found=str(manifest.release),
        )


def _check_digest(name: str, file: FileBytes, signed: str) -> None:
    if file.sha256 != signed:
        raise ReleaseError("digest", expected=f"SHA-256 {signed} of {name}", found=file.sha256)


def _read_current(version: ReleaseFolder) -> str:
    try:
        data = bytes(version.read(CURRENT, limit=128).data)
    except ReleaseError as error:
        found = f"{error.found} (publish a release with `tensorcache deploy`)"
        raise ReleaseError("current", expected=f"{error.expected} in {version.path}", found=found) from None
    match = _DIGEST.fullmatch(data)
    if match is None:
        found = shown(data.decode("latin-1"))
        raise ReleaseError(
            "current", expected="one line with a release's digest (64 hex digits)", found=found
        )
    return match[1].decode()
