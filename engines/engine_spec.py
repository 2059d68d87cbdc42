"""The facts of an engine, from what its release was built for and what whoever opens it asked for."""

from typing import Any

import numpy as np

from engines.contract import EngineSpec
from engines.driver import GPU_EXTRAS
from engines.errors import DeviceError, ReleaseError
from engines.kernel_class import exact_here
from engines.manifest import EngineManifest
from engines.options import EngineOptions


def engine_spec(
    manifest: EngineManifest, options: EngineOptions, digest: str, *, kv_identity: bytes
) -> EngineSpec:
    """What the engine will be. ReleaseError names the option that is out of range."""
    lanes = manifest.lanes if options.lanes is None else options.lanes
    max_seq_len = manifest.max_seq_len if options.max_seq_len is None else options.max_seq_len
    if options.threads < 0:
        raise ReleaseError("options", expected="threads of at least 0", found=str(options.threads))
    if lanes < 1:
        raise ReleaseError("options", expected="lanes of at least 1", found=str(lanes))
    if not 2 <= max_seq_len <= manifest.max_seq_len:
        raise ReleaseError(
            "options", expected=f"max_seq_len in 2 … {manifest.max_seq_len}", found=str(max_seq_len)
        )
    return EngineSpec(
        model=manifest.model,
        release=manifest.release,
        digest=digest,
        kv_identity=kv_identity,
        geometry=manifest.geometry,
        kv_dtype=kv_type(manifest.kv_dtype),
        block_tokens=manifest.block_tokens,
        lanes=lanes,
        max_seq_len=max_seq_len,
        positions=cache_positions(max_seq_len, manifest.block_tokens),
        max_prefill_tokens=min(
            manifest.max_prefill_tokens, max_seq_len, options.max_prefill_tokens or max_seq_len
        ),
        exact=manifest.exact and exact_here(manifest.precision),
    )


def cache_positions(max_seq_len: int, block_tokens: int) -> int:
    """S: room for max_seq_len positions and at least one scratch position, in whole blocks."""
    return -(-(max_seq_len + 1) // block_tokens) * block_tokens


def kv_type(kv_dtype: str) -> "np.dtype[Any]":
    """The numpy type of a manifest's `kv_dtype`; numpy itself has no bfloat16. DeviceError."""
    if kv_dtype != "bfloat16":
        return np.dtype(kv_dtype)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DeviceError(f"bfloat16: expected the package ml_dtypes, found none: {GPU_EXTRAS}") from error
    return np.dtype(ml_dtypes.bfloat16)
