"""Rounds float32 linear weights to 8 or 4 bits in blocks along the input, symmetric around the middle code.

A weight is (code − 2^(bits−1)) · scale, with one float32 scale per block: what ONNX Runtime's MatMulNBits and
GatherBlockQuantized read when no zero point is given.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_CANDIDATES = np.linspace(0.80, 1.06, 14, dtype=np.float32)
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """Codes [out, in·bits/8] uint8 (low nibble first for 4 bits) and scales [out, in/block] float32."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    bits: int

    def dequantise(self) -> npt.NDArray[np.float32]:
        """The weights [out, in] that a kernel sees."""
        codes = self.codes
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
        centred = codes.astype(np.float32) - np.float32(1 << (self.bits - 1))
        return centred * np.repeat(self.scales, codes.shape[1] // self.scales.shape[1], axis=1)


def quantise(weight: npt.NDArray[np.float32], bits: int, *, block: int) -> QuantisedLinear:
    """Quantise [out, in] to `bits` (8 or 4) with a scale for every `block` inputs, which divides `in`."""
    assert bits in (4, 8), f"{bits} bits"
    assert weight.shape[1] % block == 0, f"{weight.shape[1]} inputs in blocks of {block}"
    one = _int8_rows if bits == 8 else _int4_rows
    starts = range(0, weight.shape[0], _ROWS_AT_ONCE)
    parts = [one(weight[row : row + _ROWS_AT_ONCE], block) for row in starts]
    codes = np.concatenate([codes for codes, _ in parts])
    return QuantisedLinear(codes, np.concatenate([scales for _, scales in parts]), bits)


def _int8_rows(
    rows: npt.NDArray[np.float32], block: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    blocks = rows.reshape(rows.shape[0], -1, block)
    scales = (np.abs(blocks).max(axis=2) / np.float32(127)).astype(np.float32)
    codes = np.rint(blocks / _nonzero(scales)[:, :, None]) + np.float32(128)
    return codes.astype(np.uint8).reshape(rows.shape), scales


def _int4_rows(
    rows: npt.NDArray[np.float32], block: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    # The element of largest magnitude is put near code 0 (−8, the longer side); then the scale with the least
    # squared error among a few around it is kept, which costs nothing at run time.
    blocks = rows.reshape(rows.shape[0], -1, block)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    best_codes = np.full(blocks.shape, 8, dtype=np.uint8)
    best_scales = np.zeros(largest.shape, dtype=np.float32)
    best_error = np.full(largest.shape, np.inf, dtype=np.float32)
    for factor in _CANDIDATES:
        scales = (largest / np.float32(-8) * factor).astype(np.float32)
        codes = np.clip(np.rint(blocks / _nonzero(scales)[:, :, None]), -8, 7)
        error = ((codes * scales[:, :, None] - blocks) ** 2).sum(axis=2)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scales = np.where(better, scales, best_scales)
        best_codes = np.where(better[:, :, None], (codes + 8).astype(np.uint8), best_codes)
    flat = best_codes.reshape(rows.shape)
    return (flat[:, 0::2] | (flat[:, 1::2] << 4)).astype(np.uint8), best_scales


def _nonzero(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(scales == 0, np.float32(1), scales)
