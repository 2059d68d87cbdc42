"""What an engine is: the protocol, its spec, and the shapes that every implementation agrees on.

A *lane* is one row of the engine's KV cache: contiguous room for one sequence of S positions. All KV is one
allocation [layers, 2, lanes, kv_heads, S, head_dim]. Nothing outside `engines/` counts lanes: callers
reserve and release them through `LanePool`.

Invariants
- Position p of a lane is valid only if the caller wrote it by prefill, decode or import, in order from 0.
- A step never changes a lane that is not named in it, except at scratch positions at or past `max_seq_len`.
- Logits do not depend on the split of a prefill, on the batch, or on where the KV came from, as far as
  `EngineSpec.exact` says so (true for the CPU engine, measured and stated for TensorRT).

Threads: one owner (the step loop) calls every method; nothing here is locked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

LaneId = NewType("LaneId", int)

CONTRACT_VERSION = 1
_KV_FACTS = ("kv_identity", "geometry", "kv_dtype", "block_tokens", "lanes", "max_seq_len", "positions")


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a decoder that its KV and its logits depend on."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Facts about a loaded engine that schedulers and caches build on.

    `positions` is S: `max_seq_len` plus at least one scratch position, rounded up to `block_tokens`.
    `kv_identity` is 16 bytes; KV may be shared between engines if and only if it is equal. `kv_dtype` of
    bfloat16, which numpy lacks, is that of ml_dtypes.
    """

    model: str
    release: int
    digest: str
    kv_identity: bytes
    geometry: Geometry
    kv_dtype: np.dtype[Any]
    block_tokens: int
    lanes: int
    max_seq_len: int
    positions: int
    max_prefill_tokens: int
    exact: bool

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block's payload: [layers, k|v, kv_heads, block_tokens, head_dim]."""
        g = self.geometry
        return (g.layers, 2, g.kv_heads, self.block_tokens, g.head_dim)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block's payload."""
        return int(np.prod(self.block_shape)) * self.kv_dtype.itemsize


def shares_kv(one: EngineSpec, other: EngineSpec) -> bool:
    """True if lanes of one are lanes of the other, byte for byte: the same identity and the same layout."""
    return all(getattr(one, name) == getattr(other, name) for name in _KV_FACTS)


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits [rows, vocab] float32: a numpy array on "cpu", else an exporter of `__cuda_array_interface__`.

    `device` is "cpu" or "cuda:N"; `stream` is the address of the CUDA stream that writes them. The memory
    belongs to the engine and is valid until its next step.
    """

    array: Any
    device: str = "cpu"
    stream: int | None = None


class Engine(Protocol):
    """A decoder with its KV lanes. `close` frees everything; no method may be called after it.

    A call on a GPU that is lost to this process raises DeviceLostError instead of StepError.
    """

    @property
    def spec(self) -> EngineSpec:
        """Facts that never change while the engine lives."""
        ...

    def prefill(self, lane: LaneId, tokens: npt.NDArray[np.int64], start: int) -> Logits:
        """Write KV of `tokens` [T] at positions start … start+T−1 of `lane`; logits [1, V] of the last one.

        1 ≤ T ≤ spec.max_prefill_tokens and start + T ≤ spec.max_seq_len. Raises StepError.
        """
        ...

    def decode(
        self, lanes: Sequence[LaneId], tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> Logits:
        """One token for each of `lanes` (distinct, any order): logits [len(lanes), V] in the order given.

        `positions[i]` is where token i is written. Raises StepError.
        """
        ...

    def export_blocks(self, lane: LaneId, blocks: range, out: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy whole blocks of `lane` into the buffers `out` (spec.block_nbytes each), in payload order."""
        ...

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy payloads (checked by the caller) into whole blocks of `lane`; the inverse of
        export_blocks.
        """
        ...

    def prewarm(self) -> Iterator[str]:
        """Run every shape class once, so that no request pays for a first use. Lanes must be idle.

        Each turn of the iterator runs one and says which: between two, another engine may run a step.
        Raises StepError.
        """
        ...

    def adopt_kv(self, previous: "Engine") -> None:
        """Take over the lanes of `previous`, as they are, instead of our own (see `shares_kv`).

        `previous` may only be closed afterwards. Both are idle, that is between two steps.
        """
        ...

    def close(self) -> None:
        """Free the engine. Idempotent."""
        ...
