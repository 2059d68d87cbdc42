"""Open a verified release as an engine: room checked first, shapes warmed up, the golden token answered.

Invariants
- The runtime gets the verified bytes from memory; nothing is read from disk any more.
- An engine is handed out only after it answered the release's golden prompt with the release's golden token.
  On any failure before that it is closed, so that nothing of it stays in memory.
"""

import logging
import time

import numpy as np

from engines.contract import Engine, LaneId, Logits
from engines.errors import ReleaseError, StepError
from engines.host_memory import AvailableMemory, available_bytes, require_memory
from engines.loading import VerifiedRelease
from engines.manifest import EngineManifest
from engines.options import EngineOptions

logger = logging.getLogger(__name__)
SUPPORTED_RUNTIMES = ("onnxruntime",)
_PURPOSE = "open the engine (fewer lanes or a smaller max_seq_len need less)"
_KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def open_engine(
    release: VerifiedRelease, options: EngineOptions, *, available: AvailableMemory = available_bytes
) -> Engine:
    """The engine of `release`, warm and proven. Raises ReleaseError (runtime, memory, golden …), StepError.

    The engine has its own copy of what it needs: drop the release afterwards, or its bytes stay in memory
    twice.
    """
    started = time.monotonic()
    require_memory(_opening_bytes(release, options), purpose=_PURPOSE, available=available)
    engine = _create(release, options)
    try:
        engine.prewarm()
        _check_golden(engine, release.manifest)
    except BaseException:
        engine.close()
        raise
    logger.info(
        "engine ready: model=%s release=%d digest=%s runtime=%s lanes=%d max_seq_len=%d seconds=%.1f",
        engine.spec.model,
        engine.spec.release,
        release.digest[:16],
        release.manifest.runtime,
        engine.spec.lanes,
        engine.spec.max_seq_len,
        time.monotonic() - started,
    )
    return engine


def _create(release: VerifiedRelease, options: EngineOptions) -> Engine:
    if release.manifest.runtime == "onnxruntime":
        # imported here: only a process that opens such an engine needs its runtime
        from engines.ort import OrtEngine

        return OrtEngine(release.manifest, release.files, options=options, digest=release.digest)
    raise ReleaseError(
        "runtime",
        expected=f"one that this build can open ({', '.join(SUPPORTED_RUNTIMES)})",
        found=f"{release.manifest.runtime} (build the release with --target {SUPPORTED_RUNTIMES[0]})",
    )


def _opening_bytes(release: VerifiedRelease, options: EngineOptions) -> int:
    """The runtime's own copy of graph and weights, and the KV of all lanes."""
    manifest = release.manifest
    geometry = manifest.geometry
    lanes = manifest.lanes if options.lanes is None else options.lanes
    positions = (
        manifest.max_seq_len if options.max_seq_len is None else options.max_seq_len
    ) + manifest.block_tokens
    kv = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * _KV_BYTES[manifest.kv_dtype]
    return sum(entry.size for entry in manifest.files.values()) + lanes * positions * kv


def _check_golden(engine: Engine, manifest: EngineManifest) -> None:
    golden = manifest.golden
    prompt = np.asarray(golden.prompt, np.int64)
    vocab = manifest.geometry.vocab_size
    if not 0 < len(prompt) <= engine.spec.max_seq_len or prompt.min() < 0 or prompt.max() >= vocab:
        found = f"{len(prompt)} tokens, or one outside the vocabulary"
        raise ReleaseError(
            "golden", expected=f"a prompt of 1 … {engine.spec.max_seq_len} tokens", found=found
        )
    lane, last = LaneId(0), len(prompt) - 1
    step = engine.spec.max_prefill_tokens
    try:
        for start in range(0, len(prompt), step):
            logits = engine.prefill(lane, prompt[start : start + step], start)
        _check_answer(logits, golden.token, by="prefill")
        _check_answer(
            engine.decode([lane], prompt[last:], np.array([last], np.int64)), golden.token, by="decode"
        )
    except StepError as error:
        raise ReleaseError(
            "golden", expected=f"token {golden.token}", found=f"a failed step: {error}"
        ) from error


def _check_answer(logits: Logits, token: int, *, by: str) -> None:
    row = np.asarray(logits.array)[0]
    found = f"token {int(np.argmax(row))}" if np.isfinite(row).all() else "logits that are not finite"
    if found != f"token {token}":
        raise ReleaseError("golden", expected=f"token {token} after the golden prompt, by {by}", found=found)
