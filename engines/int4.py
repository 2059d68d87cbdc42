"""Symmetric INT4 weights as TensorRT reads them: positive float16 scales, no zero points, blocks of inputs.

The parser of TensorRT refuses UINT4 and any zero point other than zero, so weights are rounded anew from
float32 here, whatever block format they came from; `Int4Weights.errors` says what that cost.
"""

from collections.abc import Mapping

import numpy as np

from engines.onnx_emit import Array

INT4_BLOCK = 32  # weights along the input dimension that share one scale

_LARGEST = 7  # the scale maps the largest magnitude here; −8 is reached only by a shrunk scale
_SHRINK = (1.0, 0.95, 0.9, 0.875, 0.85, 0.8)  # clipping an outlier often costs less than a coarse scale


def quantise_int4(matrix: Array) -> tuple[Array, Array]:
    """Round [K, N] in blocks along K: int8 codes −8 … 7 [K, N] and float16 scales [K/32, N]."""
    blocks = np.ascontiguousarray(matrix, dtype=np.float32).reshape(-1, INT4_BLOCK, matrix.shape[1])
    full = np.abs(blocks).max(axis=1) / _LARGEST
    codes = np.zeros(blocks.shape, dtype=np.int8)
    scales = np.ones(full.shape, dtype=np.float16)
    least = np.full(full.shape, np.inf, dtype=np.float32)
    for shrink in _SHRINK:
        tried = (full * shrink).astype(np.float16)
        tried = np.where(tried == 0, np.float16(1), tried)
        exact = tried.astype(np.float32)[:, None, :]
        rounded = np.clip(np.rint(blocks / exact), -8, 7)
        error = ((rounded * exact - blocks) ** 2).sum(axis=1)
        better = error < least
        codes = np.where(better[:, None, :], rounded.astype(np.int8), codes)
        scales = np.where(better, tried, scales)
        least = np.where(better, error, least)
    return codes.reshape(matrix.shape), scales


def dequantise_int4(codes: Array, scales: Array) -> Array:
    """What a kernel sees: float32 [K, N]."""
    return np.asarray(codes * np.repeat(scales.astype(np.float32), INT4_BLOCK, axis=0), dtype=np.float32)


def pack_int4(codes: Array) -> Array:
    """Two codes a byte in row-major order, the first in the low half, as ONNX stores INT4."""
    pairs = np.ascontiguousarray(codes).reshape(-1, 2).view(np.uint8) & 0x0F
    return np.asarray(pairs[:, 0] | (pairs[:, 1] << 4), dtype=np.uint8)


class Int4Weights:
    """Rounds weights by name, each once for its codes and then its scales.

    `errors` fills as weights are rounded: ‖rounded − exact‖ / ‖exact‖ of each.
    """

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights
        self._held: tuple[str, Array, Array] | None = None
        self.errors: dict[str, float] = {}

    def codes(self, name: str) -> Array:
        """Packed codes of the transposed weight."""
        return pack_int4(self._rounded(name)[0])

    def scales(self, name: str) -> Array:
        """Its scales; what was held for them is let go."""
        scales = self._rounded(name)[1]
        self._held = None
        return scales

    def _rounded(self, name: str) -> tuple[Array, Array]:
        if self._held is None or self._held[0] != name:
            exact = np.asarray(self._weights[name]).T
            codes, scales = quantise_int4(exact)
            self.errors[name] = _relative_error(dequantise_int4(codes, scales), exact)
            self._held = (name, codes, scales)
        return self._held[1], self._held[2]


def _relative_error(rounded: Array, exact: Array) -> float:
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(rounded - exact)) / norm if norm else 0.0
