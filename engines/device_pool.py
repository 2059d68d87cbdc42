"""The KV of all lanes in one allocation on the device, and block copies in and out of it.

The pool is [layers, k|v, lanes, kv_heads, S, head_dim].

A block is `block_tokens` positions of a lane, one strided copy: on the host its payload [layers, k|v,
kv_heads, block_tokens, head_dim] lies without gaps, on the device every row of it (one head's positions)
is S positions apart from the next, and every layer's keys or values are all lanes' heads apart.

    row    = block_tokens · head_dim · size         one head
    slice  = kv_heads rows, S · head_dim · size apart
    box    = layers · 2 slices, lanes · kv_heads rows apart

Invariants
- Memory is zero until written: a masked position has weight 0, and 0 · NaN would be NaN.
- Every lane slice starts at an address that is a multiple of 256 (checked when the release is built).

Threads: one owner, inside `Device.current()`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engines.contract import EngineSpec, LaneId
from engines.cuda import Box, Device, Stream

Bytes = npt.NDArray[np.uint8]


class KVMemory(Protocol):
    """Where the K/V tensors of a step are bound."""

    def address(self, layer: int, kind: int, lane: int) -> int:
        """Where the keys (kind 0) or values (kind 1) of a lane begin; following lanes come right after."""
        ...


class DevicePool:
    """Owns the lanes' memory; whoever binds addresses of it must not outlive it."""

    def __init__(self, device: Device, stream: Stream, spec: EngineSpec, *, lanes: int) -> None:
        g, size = spec.geometry, spec.kv_dtype.itemsize
        self.lanes = lanes
        self._head = spec.positions * g.head_dim * size
        self._lane = g.kv_heads * self._head
        self._row = spec.block_tokens * g.head_dim * size
        self._block_nbytes = spec.block_nbytes
        self._whole_blocks = spec.max_seq_len // spec.block_tokens
        self._box = Box(
            width=self._row,
            rows=g.kv_heads,
            depth=2 * g.layers,
            device_pitch=self._head,
            device_rows=lanes * g.kv_heads,
        )
        self._memory = device.allocate_zeroed(kv_bytes(spec, lanes=lanes), stream)

    def address(self, layer: int, kind: int, lane: int) -> int:
        """See `KVMemory.address`."""
        assert 0 <= lane < self.lanes, f"lane {lane} of {self.lanes}"
        return self._memory.address + ((2 * layer + kind) * self.lanes + lane) * self._lane

    def export_blocks(self, stream: Stream, lane: LaneId, blocks: range, out: Sequence[Bytes]) -> None:
        """Copy blocks of a lane into `out`, one buffer each; all are there when this returns."""
        self._check(blocks, out)
        start = self.address(0, 0, lane)
        try:
            for block, target in zip(blocks, out, strict=True):
                stream.download_box(target, start + block * self._row, self._box)
        finally:
            stream.synchronise()  # also after a failure: the buffers go back to the caller

    def import_blocks(self, stream: Stream, lane: LaneId, blocks: range, payloads: Sequence[Bytes]) -> None:
        """Copy `payloads`, one buffer each, into blocks of a lane; none is needed when this returns."""
        self._check(blocks, payloads)
        start = self.address(0, 0, lane)
        try:
            for block, source in zip(blocks, payloads, strict=True):
                stream.upload_box(start + block * self._row, source, self._box)
        finally:
            stream.synchronise()

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        self._memory.free()

    def _check(self, blocks: range, buffers: Sequence[Bytes]) -> None:
        expected = range(blocks.start, blocks.start + len(buffers))
        assert blocks == expected, f"{blocks} with {len(buffers)} buffers"
        assert 0 <= blocks.start <= blocks.stop <= self._whole_blocks, f"{blocks} of {self._whole_blocks}"
        whole = (np.dtype(np.uint8), (self._block_nbytes,), (1,))
        for buffer in buffers:
            assert (buffer.dtype, buffer.shape, buffer.strides) == whole, "not one payload"


class SharedLayer:
    """Room for one layer's keys of all lanes, standing for every layer where nobody reads the result.

    An engine that warms up beside another, whose lanes it will adopt, runs its widest steps on this.
    """

    def __init__(self, device: Device, stream: Stream, spec: EngineSpec) -> None:
        self._memory = device.allocate_zeroed(layer_bytes(spec), stream)

    def address(self, layer: int, kind: int, lane: int) -> int:
        """The same for every layer, and for keys and values."""
        assert lane == 0, "steps on a shared layer begin at its first lane"
        return self._memory.address

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        self._memory.free()


def kv_bytes(spec: EngineSpec, *, lanes: int) -> int:
    """Bytes of `lanes` lanes."""
    return 2 * spec.geometry.layers * lanes * _lane_bytes(spec)


def layer_bytes(spec: EngineSpec) -> int:
    """Bytes of one layer's keys of all lanes."""
    return spec.lanes * _lane_bytes(spec)


def _lane_bytes(spec: EngineSpec) -> int:
    g = spec.geometry
    return g.kv_heads * spec.positions * g.head_dim * spec.kv_dtype.itemsize
