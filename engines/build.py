"""Builds a release folder from a decoder: graph, weights, tokenizer and a manifest that fixes every byte of
them.

The folder is written under a temporary name, flushed to disk, and renamed to the digest of its manifest.
The engine just built runs once before that: its answer to a prompt with a clear margin becomes the golden
token.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from tokenizers import Tokenizer

from engines.contract import CONTRACT_VERSION, LaneId
from engines.decoder import Decoder, kv_digest, weight_shapes
from engines.errors import BuildError
from engines.graph_onnxruntime import Precision, build_onnxruntime_graph, check_decoder
from engines.kernel_class import kernel_class
from engines.manifest import (
    FORMAT,
    MANIFEST,
    MODEL_NAME,
    MODEL_NAME_RULE,
    EngineManifest,
    FileEntry,
    Golden,
    encode_manifest,
    release_digest,
)
from engines.onnx_emit import WEIGHTS_FILE, EmittedGraph
from engines.options import EngineOptions
from engines.ort import OrtEngine, cache_positions
from engines.release_folder import shown
from engines.smoothing import SmoothedDecoder, smooth

GRAPH_FILE = "graph.onnx"
TOKENIZER_FILE = "tokenizer.json"
GOLDEN_MARGIN = 1.0

Progress = Callable[[str, float], None]
"""Told what is being done and how much of it is done, 0 … 1."""

_GOLDEN_TEXTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "Monday, Tuesday, Wednesday, Thursday, Friday,",
    "a b c d e f g h i j k l m n o p",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Germany is",
    "Once upon a",
)
_KV_ALIGNMENT = 256
_READ_BYTES = 1 << 20


class BuildOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to build. `lanes` and `max_seq_len` are defaults and bounds that opening a release may lower."""

    target: Literal["onnxruntime"] = "onnxruntime"
    precision: Precision = "int8"
    lanes: int = 8
    max_seq_len: int = 4096
    block_tokens: int = 32
    max_prefill_tokens: int = 512


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

    Raises BuildError naming the option or the weight that no engine can be built from.
    """
    _check(decoder, options, model, release)
    positions = cache_positions(options.max_seq_len, options.block_tokens)
    progress("measure activations", 0.0)
    quantised = options.precision != "fp32"
    smoothed = smooth(decoder) if quantised else SmoothedDecoder(decoder, embed_divisor=None)
    decoder = smoothed.decoder
    graph = build_onnxruntime_graph(
        decoder, precision=options.precision, positions=positions, embed_divisor=smoothed.embed_divisor
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".building-", dir=out_dir))
    try:
        weights_digest = _write_weights(folder, graph, decoder, progress)
        (folder / GRAPH_FILE).write_bytes(graph.model_bytes())
        (folder / TOKENIZER_FILE).write_bytes(decoder.tokenizer_json)
        manifest = _manifest(decoder, folder, options, weights_digest, name=(model, release))
        progress("golden token", 0.0)
        manifest = msgspec.structs.replace(manifest, golden=_golden(manifest, folder, decoder))
        data = encode_manifest(manifest)
        (folder / MANIFEST).write_bytes(data)
        return _publish(folder, out_dir / release_digest(data))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gone already where it was renamed


def _check(decoder: Decoder, options: BuildOptions, model: str, release: int) -> None:
    config, g = decoder.config, decoder.config.geometry
    check_decoder(decoder, options.precision)
    if not MODEL_NAME.fullmatch(model):
        raise BuildError(f"model: must be {MODEL_NAME_RULE}, got {shown(model)}")
    block = options.block_tokens
    if block < 8 or block > 512 or block & (block - 1):
        raise BuildError(f"block_tokens: must be a power of two in 8 … 512, got {block}")
    _in_range("release", release, 1, 2**53)
    _in_range("lanes", options.lanes, 1, 1024)
    _in_range("max_seq_len", options.max_seq_len, 2, config.context)
    _in_range("max_prefill_tokens", options.max_prefill_tokens, 2, options.max_seq_len)
    lane = g.kv_heads * cache_positions(options.max_seq_len, block) * g.head_dim * 4
    if lane % _KV_ALIGNMENT:
        raise BuildError(
            f"kv_heads × positions × head_dim: must fill a multiple of {_KV_ALIGNMENT} bytes, got {lane}"
        )


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BuildError(f"{name}: must be in {low} … {high}, got {value}")


def _write_weights(folder: Path, graph: EmittedGraph, decoder: Decoder, progress: Progress) -> str:
    """Write the weights file, one tensor in memory at a time; the digest of all weights after quantisation.

    The digest is over names and values, not the file: rotary tables, whose length is an option, and the
    place of a tensor in the file do not change what KV means.
    """
    digest = hashlib.sha256()
    total = max(weight.offset + weight.length for weight in graph.weights)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        for weight in graph.weights:
            progress("weights", weight.offset / total)
            data = weight.array().reshape(-1).view(np.uint8).data
            file.write(b"\0" * (weight.offset - file.tell()))
            file.write(data)
            if not weight.name.startswith("rope."):
                digest.update(f"{weight.name} {weight.element} {weight.shape} ".encode())
                digest.update(data)
    for name, shape in weight_shapes(decoder.config).items():
        if len(shape) == 1:  # norms and biases, which the graph holds itself
            digest.update(f"{name} {shape} ".encode())
            digest.update(np.ascontiguousarray(decoder.weights[name], dtype=np.float32).data)
    return digest.hexdigest()


def _manifest(
    decoder: Decoder, folder: Path, options: BuildOptions, weights_digest: str, *, name: tuple[str, int]
) -> EngineManifest:
    config = decoder.config
    files = {file: _entry(folder / file) for file in (GRAPH_FILE, WEIGHTS_FILE, TOKENIZER_FILE)}
    kernels = kernel_class()
    identity = {
        "weights": weights_digest,
        "recipe": f"{options.target}/{options.precision}",
        "kv_dtype": "float32",
        "decoder": kv_digest(config).hex(),
        "tokenizer": files[TOKENIZER_FILE].sha256,
        "block_tokens": str(options.block_tokens),
        "contract": str(CONTRACT_VERSION),
        "kernels": kernels,
    }
    return EngineManifest(
        format=FORMAT,
        model=name[0],
        release=name[1],
        runtime=options.target,
        graph=GRAPH_FILE,
        files=files,
        geometry=config.geometry,
        precision=options.precision,
        kv_dtype="float32",
        kv_layout="linear",
        block_tokens=options.block_tokens,
        lanes=options.lanes,
        max_seq_len=options.max_seq_len,
        max_prefill_tokens=options.max_prefill_tokens,
        exact=True,
        kv_identity=kv_identity(identity).hex(),
        kernel_class=kernels,
        weights_digest=weights_digest,
        tokenizer_digest=files[TOKENIZER_FILE].sha256,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        add_bos=config.add_bos,
        chat_template=decoder.chat_template,
        golden=Golden(prompt=(), token=0, margin=0.0),
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


def _golden(manifest: EngineManifest, folder: Path, decoder: Decoder) -> Golden:
    """The first prompt whose best token is at least GOLDEN_MARGIN above the second, as the new engine answers
    it.
    """
    files = {name: memoryview((folder / name).read_bytes()) for name in manifest.files}
    engine = OrtEngine(manifest, files, options=EngineOptions(lanes=1), digest="")
    tokenizer = Tokenizer.from_str(decoder.tokenizer_json.decode())
    best = 0.0
    try:
        for text in _GOLDEN_TEXTS:
            prompt = tokenizer.encode(text, add_special_tokens=False).ids[: engine.spec.max_prefill_tokens]
            if not prompt:
                continue
            logits = engine.prefill(LaneId(0), np.array(prompt, dtype=np.int64), 0).array[0]
            second, first = np.sort(logits)[-2:]
            if not np.isfinite(logits).all():
                raise BuildError("weights: the engine built from them computes logits that are not finite")
            best = max(best, float(first - second))
            if first - second >= GOLDEN_MARGIN:
                margin = round(float(first - second), 3)
                return Golden(prompt=tuple(prompt), token=int(logits.argmax()), margin=margin)
    finally:
        engine.close()
    raise BuildError(
        f"golden token: no prompt separates its best two tokens by {GOLDEN_MARGIN}, the widest by {best:.3f}"
    )


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
