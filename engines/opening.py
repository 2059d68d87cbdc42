"""Open a verified release as an engine: room checked first, shapes warmed up, the golden token answered.

Invariants
- The runtime gets the verified bytes from memory; nothing is read from disk any more.
- An engine is handed out only after it answered the release's golden prompt with the release's golden token.
  On any failure before that it is closed, so that nothing of it stays in memory.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engines.contract import Engine, EngineSpec, LaneId, Logits
from engines.errors import ReleaseError, StepError
from engines.host_memory import AvailableMemory, available_bytes, require_memory
from engines.loading import VerifiedRelease
from engines.manifest import EngineManifest
from engines.options import EngineOptions

T = TypeVar("T")


class Runner(Protocol):
    """Runs jobs one at a time where engines may be called, and returns or raises what they do."""

    def __call__(self, job: Callable[[], T], /) -> T:
        """Run it."""
        ...


def at_once(job: Callable[[], T], /) -> T:
    """The runner of whoever has no other engine at work."""
    return job()


logger = logging.getLogger(__name__)
_PURPOSE = "open the engine (fewer lanes or a smaller max_seq_len need less)"
_PLAN_HOST_BYTES = 512 << 20  # an allowance for TensorRT, pinned buffers and the driver: not measured
_KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def open_engine(
    release: VerifiedRelease,
    options: EngineOptions,
    *,
    beside: EngineSpec | None = None,
    run: Runner = at_once,
    available: AvailableMemory = available_bytes,
) -> Engine:
    """The engine of `release`, warm and proven. ReleaseError (memory, contract, golden …), StepError,
    DeviceError (no driver, no GPU, no GPU libraries).

    The engine has its own copy of what it needs: drop the release afterwards, or its bytes stay in memory
    twice. `beside`: an engine serves meanwhile; if its lanes are ours (`shares_kv`), room for them is not
    asked for, and the caller lets us `adopt_kv` afterwards. `run` runs each step of the prewarm and of the
    golden token, which no other engine's step may overlap.
    """
    started = time.monotonic()
    need, free = _opening_bytes(release, options), available()
    manifest = release.manifest
    logger.info(
        "host memory: model=%s release=%d need=%d free=%d", manifest.model, manifest.release, need, free
    )
    require_memory(need, purpose=_PURPOSE, available=lambda: free)
    engine = _create(release, options, beside)
    try:
        warm_up = engine.prewarm()
        while run(lambda: next(warm_up, None)) is not None:
            pass
        _check_golden(engine, manifest, run=run)
    except BaseException:
        engine.close()
        raise
    logger.info(
        "engine ready: model=%s release=%d digest=%s runtime=%s lanes=%d max_seq_len=%d seconds=%.1f",
        engine.spec.model,
        engine.spec.release,
        release.digest[:16],
        manifest.runtime,
        engine.spec.lanes,
        engine.spec.max_seq_len,
        time.monotonic() - started,
    )
    return engine


def _create(release: VerifiedRelease, options: EngineOptions, beside: EngineSpec | None) -> Engine:
    if release.manifest.runtime == "tensorrt":
        return _create_on_gpu(release, options, beside)
    # imported here: only a process that opens such an engine needs its runtime
    from engines.ort import OrtEngine

    # its pool takes memory page by page: beside another engine nothing needs to be left out
    return OrtEngine(release.manifest, release.files, options=options, digest=release.digest)


def _create_on_gpu(release: VerifiedRelease, options: EngineOptions, beside: EngineSpec | None) -> Engine:
    # imported here: only a process that opens such an engine needs the GPU's libraries
    from engines.driver import require_driver
    from engines.plan_header import check_plan
    from engines.tensorrt_engine import TensorRTEngine
    from engines.trt import library_version

    manifest = release.manifest
    gpu = require_driver(options.device)
    check_plan(
        manifest,
        release.files[manifest.graph],
        library=library_version(),
        compute_capability=gpu.compute_capability,
        gpu_name=gpu.name,
    )
    return TensorRTEngine(manifest, release.files, options=options, digest=release.digest, beside=beside)


def _opening_bytes(release: VerifiedRelease, options: EngineOptions) -> int:
    """Host memory: the runtime's own copy of graph and weights, and the KV of all lanes.

    A plan's weights and KV go to the GPU, and the bytes that it is read from are in memory already.
    """
    manifest = release.manifest
    if manifest.runtime == "tensorrt":
        return _PLAN_HOST_BYTES
    geometry = manifest.geometry
    lanes = manifest.lanes if options.lanes is None else options.lanes
    positions = (
        manifest.max_seq_len if options.max_seq_len is None else options.max_seq_len
    ) + manifest.block_tokens
    kv = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * _KV_BYTES[manifest.kv_dtype]
    return sum(entry.size for entry in manifest.files.values()) + lanes * positions * kv


def _check_golden(engine: Engine, manifest: EngineManifest, *, run: Runner) -> None:
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
    at = np.array([last], np.int64)
    try:
        for start in range(0, len(prompt), step):
            answer = run(partial(_prefill, engine, prompt[start : start + step], start))
        _check_answer(answer, golden.token, by="prefill")
        answer = run(lambda: _row(engine.decode([lane], prompt[last:], at)))
        _check_answer(answer, golden.token, by="decode")
    except StepError as error:
        raise ReleaseError(
            "golden", expected=f"token {golden.token}", found=f"a failed step: {error}"
        ) from error


def _prefill(engine: Engine, part: npt.NDArray[np.int64], start: int) -> npt.NDArray[np.float32]:
    return _row(engine.prefill(LaneId(0), part, start))


def _row(logits: Logits) -> npt.NDArray[np.float32]:
    """A copy on the host: the logits are the engine's until its next step."""
    return np.array(np.asarray(logits.array)[0])


def _check_answer(row: npt.NDArray[np.float32], token: int, *, by: str) -> None:
    found = f"token {int(np.argmax(row))}" if np.isfinite(row).all() else "logits that are not finite"
    if found != f"token {token}":
        raise ReleaseError("golden", expected=f"token {token} after the golden prompt, by {by}", found=found)
