"""The KV of all lanes in one allocation [layers, k|v, lanes, kv_heads, S, head_dim], and block copies in
and out of it.

A block is `block_tokens` positions of a lane; its payload is [layers, k|v, kv_heads, block_tokens,
head_dim]. Buffers that lie at a constant distance from one another (slots of an arena) are copied together
in one strided copy.

Invariants
- Memory is taken from the system page by page as positions are first written; what was never written reads
  as zero.
- Every lane slice starts at an address that is a multiple of 256 (the geometry is checked when a release is
  built).
"""

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from engines.contract import EngineSpec, LaneId

Bytes = npt.NDArray[np.uint8]


class KVPool:
    """Owns the memory; whoever binds addresses of it must not outlive it."""

    def __init__(self, spec: EngineSpec) -> None:
        g = spec.geometry
        shape = (g.layers, 2, spec.lanes, g.kv_heads, spec.positions, g.head_dim)
        self._map = mmap.mmap(-1, int(np.prod(shape)) * spec.kv_dtype.itemsize)
        self.array: npt.NDArray[Any] = np.frombuffer(self._map, dtype=spec.kv_dtype).reshape(shape)
        self._block_shape = spec.block_shape
        self._block_nbytes = spec.block_nbytes
        self._block_tokens = spec.block_tokens
        self._whole_blocks = spec.max_seq_len // spec.block_tokens

    def address(self, layer: int, kind: int, lane: int) -> int:
        """Where the keys (kind 0) or values (kind 1) of a lane begin; following lanes come right after."""
        return int(self.array[layer, kind, lane].__array_interface__["data"][0])

    def export_blocks(self, lane: LaneId, blocks: range, out: Sequence[Bytes]) -> None:
        """Copy blocks of a lane into `out`, one buffer each."""
        source = self._blocks(lane, blocks, len(out))
        for first, run in self._runs(out):
            np.copyto(run, source[first : first + len(run)])

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Sequence[Bytes]) -> None:
        """Copy `payloads`, one buffer each, into blocks of a lane."""
        target = self._blocks(lane, blocks, len(payloads))
        for first, run in self._runs(payloads):
            np.copyto(target[first : first + len(run)], run)

    def _blocks(self, lane: LaneId, blocks: range, buffers: int) -> npt.NDArray[Any]:
        """View [block, layers, k|v, kv_heads, block_tokens, head_dim] of a lane's blocks."""
        assert 0 <= lane < self.array.shape[2], f"lane {lane} of {self.array.shape[2]}"
        assert blocks == range(blocks.start, blocks.start + buffers), f"{blocks} with {buffers} buffers"
        assert 0 <= blocks.start <= blocks.stop <= self._whole_blocks, f"{blocks} of {self._whole_blocks}"
        layers, kinds, heads, tokens, dim = self._block_shape
        positions = self.array[:, :, lane, :, blocks.start * tokens : blocks.stop * tokens, :]
        return positions.reshape(layers, kinds, heads, len(blocks), tokens, dim).transpose(3, 0, 1, 2, 4, 5)

    def _runs(self, buffers: Sequence[Bytes]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Cut `buffers` into runs at a constant distance; each as one array [blocks, *block shape]."""
        whole = (np.dtype(np.uint8), (self._block_nbytes,), (1,))
        for buffer in buffers:
            assert (buffer.dtype, buffer.shape, buffer.strides) == whole, "not one payload"
        addresses = [int(buffer.__array_interface__["data"][0]) for buffer in buffers]
        first = 0
        while first < len(buffers):
            end = first + 1
            distance = addresses[end] - addresses[first] if end < len(buffers) else 0
            while end < len(buffers) and addresses[end] - addresses[end - 1] == distance:
                end += 1
            payload = buffers[first].view(self.array.dtype).reshape(self._block_shape)
            # Every block of the run is one of the caller's buffers, all alive during the copy.
            yield first, as_strided(payload, (end - first, *payload.shape), (distance, *payload.strides))
            first = end
