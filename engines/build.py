"""Builds a release folder from a decoder: what a runtime runs, the tokenizer, and a manifest that fixes every
byte of them.

The folder is written under a temporary name, flushed to disk, and renamed to the digest of its manifest.
The engine just built runs once before that: its answer to a prompt with a clear margin becomes the golden
token.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engines.build_files import Progress, map_file
from engines.build_options import BuildOptions, Built, PlanOptions, check_options, check_precision
from engines.contract import CONTRACT_VERSION, Engine
from engines.decoder import Decoder, kv_digest
from engines.golden import GOLDEN_MARGIN, find_golden
from engines.manifest import (
    FORMAT,
    MANIFEST,
    EngineManifest,
    FileEntry,
    Golden,
    encode_manifest,
    release_digest,
)
from engines.options import EngineOptions

__all__ = ["GOLDEN_MARGIN", "BuildOptions", "PlanOptions", "build_release", "kv_identity", "require_target"]

TOKENIZER_FILE = "tokenizer.json"

_READ_BYTES = 1 << 20


def require_target(options: BuildOptions) -> None:
    """Refuse, before any weight is read, what this machine cannot build. BuildError, DeviceError."""
    check_precision(options)
    if options.target == "tensorrt":
        from engines.build_tensorrt import require_gpu

        require_gpu(options.plan.device)


def build_release(
    decoder: Decoder,
    out_dir: Path,
    *,
    model: str,
    release: int,
    options: BuildOptions,
    progress: Progress = lambda stage, done: None,
) -> Path:
    """Write `<out_dir>/<digest>/` and return it; an equal release already there is returned as it is.

    Raises BuildError naming the option or the weight that no engine can be built from, and DeviceError where
    the target needs a GPU and there is none.
    """
    check_options(decoder, options, model=model, release=release)
    require_target(options)
    out_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".building-", dir=out_dir))
    try:
        built = _build(decoder, folder, options=options, progress=progress)
        (folder / TOKENIZER_FILE).write_bytes(decoder.tokenizer_json)
        manifest = _manifest(decoder, folder, options, built, name=(model, release))
        progress("golden token", 0.0)
        manifest = msgspec.structs.replace(manifest, golden=_golden(manifest, folder, options))
        data = encode_manifest(manifest)
        (folder / MANIFEST).write_bytes(data)
        return _publish(folder, out_dir / release_digest(data))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gone already where it was renamed


def _build(decoder: Decoder, folder: Path, *, options: BuildOptions, progress: Progress) -> Built:
    # imported here: who builds for one target need not have the libraries of the other
    if options.target == "tensorrt":
        from engines.build_tensorrt import build_tensorrt

        return build_tensorrt(decoder, folder, options=options, progress=progress)
    from engines.build_onnxruntime import build_onnxruntime

    return build_onnxruntime(decoder, folder, options=options, progress=progress)


def _manifest(
    decoder: Decoder, folder: Path, options: BuildOptions, built: Built, *, name: tuple[str, int]
) -> EngineManifest:
    config = decoder.config
    files = {file: _entry(folder / file) for file in (*built.files, TOKENIZER_FILE)}
    # Never the version of TensorRT, nor the GPU: a plan built anew, or on another node, finds its blocks.
    identity = {
        "weights": built.weights_digest,
        "recipe": f"{options.target}/{options.precision}",
        "kv_dtype": options.kv_dtype,
        "decoder": kv_digest(config).hex(),
        "tokenizer": files[TOKENIZER_FILE].sha256,
        "block_tokens": str(options.block_tokens),
        "contract": str(CONTRACT_VERSION),
        "kernels": built.kernel_class,
    }
    return EngineManifest(
        format=FORMAT,
        model=name[0],
        release=name[1],
        runtime=options.target,
        graph=built.graph,
        files=files,
        geometry=config.geometry,
        precision=options.precision,
        kv_dtype=options.kv_dtype,
        kv_layout="linear",
        block_tokens=options.block_tokens,
        lanes=options.lanes,
        max_seq_len=options.max_seq_len,
        max_prefill_tokens=options.max_prefill_tokens,
        exact=built.exact,
        kv_identity=kv_identity(identity).hex(),
        kernel_class=built.kernel_class,
        weights_digest=built.weights_digest,
        tokenizer_digest=files[TOKENIZER_FILE].sha256,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        add_bos=config.add_bos,
        chat_template=decoder.chat_template,
        golden=Golden(prompt=(), token=0, margin=0.0),
        tensorrt=built.tensorrt,
    )


def kv_identity(fields: Mapping[str, str]) -> bytes:
    """16 bytes over everything that KV values depend on; every field is named and length-prefixed."""
    digest = hashlib.blake2b(digest_size=16, person=b"kv_identity")
    for name in sorted(fields):
        for part in (name.encode(), fields[name].encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _entry(path: Path) -> FileEntry:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return FileEntry(sha256=digest.hexdigest(), size=path.stat().st_size)


def _golden(manifest: EngineManifest, folder: Path, options: BuildOptions) -> Golden:
    """What the new engine answers."""
    engine = _open(manifest, folder, options)
    try:
        return find_golden(engine, (folder / TOKENIZER_FILE).read_bytes())
    finally:
        engine.close()


def _open(manifest: EngineManifest, folder: Path, options: BuildOptions) -> Engine:
    """With one lane, and straight from the folder: nobody else has seen these bytes yet."""
    files = {name: map_file(folder / name) for name in manifest.files}
    opening = EngineOptions(lanes=1, device=options.plan.device)
    if options.target == "tensorrt":
        from engines.tensorrt_engine import TensorRTEngine

        return TensorRTEngine(manifest, files, options=opening, digest="", beside=None)
    from engines.ort import OrtEngine

    return OrtEngine(manifest, files, options=opening, digest="")


def _publish(folder: Path, target: Path) -> Path:
    if target.is_dir():
        return target
    for path in [*folder.iterdir(), folder]:
        _fsync(path)
    folder.chmod(0o755)
    folder.rename(target)
    _fsync(target.parent)
    return target


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
