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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engines.errors import ReleaseError
from engines.host_memory import AvailableMemory, available_bytes, require_memory
from engines.manifest import MANIFEST, SIGNATURE, EngineManifest, parse_manifest, release_digest
from engines.release_folder import FileBytes, FileStatus, ReleaseFolder, shown
from engines.signing import MAX_MANIFEST_BYTES, MAX_SIGNATURE_BYTES, check_names, verify_signature
from engines.trust import TrustSettings
from engines.version_folder import CURRENT, RELEASES

TOKENIZER = "tokenizer.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CURRENT = re.compile(rb"([0-9a-f]{64})\n?")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The digest that a file must have (for model.sig: had), and its status when it was read."""

    sha256: str
    status: FileStatus


@dataclass(frozen=True, slots=True)
class ReleaseFacts:
    """What a later look at the folder is compared with. Small: no bytes of the release hang on it."""

    digest: str
    path: Path
    files: Mapping[str, FileFacts]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.status.size for file in self.files.values())


@dataclass(frozen=True, slots=True)
class VerifiedRelease:
    """A release that passed the chain. `files` holds the verified bytes of every file, model.sig included.

    The views are read-only, 64-byte aligned and backed by private memory; `facts` says where they came from
    and what the files looked like.
    """

    manifest: EngineManifest
    digest: str
    files: Mapping[str, memoryview]
    facts: ReleaseFacts

    @property
    def path(self) -> Path:
        """The folder that it was read from, for messages."""
        return self.facts.path


@dataclass(frozen=True, slots=True)
class InspectedRelease:
    """A release whose signature, names, age and sizes are right; its weights were not read."""

    manifest: EngineManifest
    facts: ReleaseFacts


def load_release(
    version_dir: Path,
    digest: str | None = None,
    *,
    model: str,
    trust: TrustSettings,
    available: AvailableMemory = available_bytes,
) -> VerifiedRelease:
    """Verify and read the release of `digest` (default: the one that `version_dir`/current names).

    ReleaseError if any check refuses.
    """
    _require_keys(trust)
    with _published(version_dir, digest) as (folder, name):
        return _load(folder, model=model, trust=trust, available=available, digest=name)


def inspect_release(version_dir: Path, digest: str, *, model: str, trust: TrustSettings) -> InspectedRelease:
    """The chain up to where it would read the weights, comparing sizes only. ReleaseError if it refuses."""
    _require_keys(trust)
    with _published(version_dir, digest) as (folder, name):
        described = _describe(folder, model=model, trust=trust, digest=name)
        facts = dict(described.facts)
        for file, entry in described.manifest.files.items():
            status = folder.status(file)
            if status.size != entry.size:
                raise ReleaseError(
                    "files", expected=f"{entry.size} bytes in {file}", found=f"{status.size} bytes"
                )
            facts[file] = FileFacts(entry.sha256, status)
        return InspectedRelease(described.manifest, _facts(folder, name, facts))


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


@contextmanager
def _published(version_dir: Path, digest: str | None) -> Iterator[tuple[ReleaseFolder, str]]:
    with ReleaseFolder.open(version_dir, follow=True) as version:
        name = _read_current(version) if digest is None else digest
        if not _DIGEST.fullmatch(name):
            raise ReleaseError("digest", expected="64 hex digits", found=shown(name))
        with version.folder(RELEASES) as releases, releases.folder(name) as folder:
            yield folder, name


def _load(
    folder: ReleaseFolder,
    *,
    model: str | None,
    trust: TrustSettings,
    available: AvailableMemory,
    digest: str | None,
) -> VerifiedRelease:
    try:
        described = _describe(folder, model=model, trust=trust, digest=digest)
        return _read(folder, described, available=available)
    except ReleaseError as error:
        # A traceback keeps its frames alive, and they hold what was read so far: gigabytes, for as long as
        # somebody keeps the error. The text says it all.
        refused = error.with_traceback(None)
        refused.__context__ = None
    raise refused


@dataclass(frozen=True, slots=True)
class _Described:
    """A release that may be read: engine.json and model.sig are known, nothing else was touched."""

    manifest: EngineManifest
    digest: str
    files: Mapping[str, memoryview]
    facts: Mapping[str, FileFacts]


def _describe(
    folder: ReleaseFolder, *, model: str | None, trust: TrustSettings, digest: str | None
) -> _Described:
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
    read = {MANIFEST: description, SIGNATURE: signature}
    return _Described(
        manifest=manifest,
        digest=found_digest,
        files={name: file.data for name, file in read.items()},
        facts={name: FileFacts(file.sha256, file.status) for name, file in read.items()},
    )


def _read(folder: ReleaseFolder, described: _Described, *, available: AvailableMemory) -> VerifiedRelease:
    manifest = described.manifest
    need = sum(entry.size for entry in manifest.files.values())
    require_memory(need, purpose="read the release", available=available)
    files, facts = dict(described.files), dict(described.facts)
    for name, entry in manifest.files.items():
        file = folder.read(name, size=entry.size)
        _check_digest(name, file, entry.sha256)
        files[name], facts[name] = file.data, FileFacts(file.sha256, file.status)
        if name == TOKENIZER and file.sha256 != manifest.tokenizer_digest:
            raise ReleaseError(
                "tokenizer", expected=f"SHA-256 {manifest.tokenizer_digest}", found=file.sha256
            )
    return VerifiedRelease(
        manifest, described.digest, MappingProxyType(files), _facts(folder, described.digest, facts)
    )


def _facts(folder: ReleaseFolder, digest: str, files: Mapping[str, FileFacts]) -> ReleaseFacts:
    return ReleaseFacts(digest, folder.path.absolute(), MappingProxyType(dict(files)))


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
    match = _CURRENT.fullmatch(data)
    if match is None:
        found = shown(data.decode("latin-1"))
        raise ReleaseError(
            "current", expected="one line with a release's digest (64 hex digits)", found=found
        )
    return match[1].decode()
