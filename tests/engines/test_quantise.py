"""Block quantisation: codes, scales, and how far they may be from the weights."""

import numpy as np
import pytest

from engines.quantise import quantise

BLOCK = 32


def weights(rows: int = 9, columns: int = 96, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize(("bits", "columns"), [(8, 96), (4, 48)])
def test_shapes(bits: int, columns: int) -> None:
    made = quantise(weights(), bits, block=BLOCK)
    assert (made.codes.shape, made.codes.dtype) == ((9, columns), np.uint8)
    assert (made.scales.shape, made.scales.dtype) == ((9, 96 // BLOCK), np.float32)


def test_int8_is_within_half_a_step_of_every_weight() -> None:
    w = weights()
    made = quantise(w, 8, block=BLOCK)
    step = np.repeat(made.scales, BLOCK, axis=1)
    assert (np.abs(made.dequantise() - w) <= step / 2 * 1.0001).all()
    assert made.codes.min() >= 1, "symmetric: −127 … 127 around code 128"


def test_int4_beats_plain_rounding() -> None:
    w = weights(64, 256)
    blocks = w.reshape(64, -1, BLOCK)
    plain_scale = np.abs(blocks).max(axis=2, keepdims=True) / 7
    plain = np.rint(blocks / plain_scale) * plain_scale
    error = float(((quantise(w, 4, block=BLOCK).dequantise() - w) ** 2).mean())
    assert error < 0.75 * float(((plain - blocks) ** 2).mean())


def test_int4_packs_the_first_of_two_in_the_low_nibble() -> None:
    w = np.zeros((1, BLOCK), dtype=np.float32)
    w[0, :3] = [-8, 3, 7]
    made = quantise(w, 4, block=BLOCK)
    assert np.allclose(made.dequantise(), w)
    assert (int(made.codes[0, 0]) & 15, int(made.codes[0, 0]) >> 4) == (0, 11)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(bits: int) -> None:
    assert not quantise(np.zeros((2, 64), dtype=np.float32), bits, block=BLOCK).dequantise().any()


def test_many_rows_equal_one_by_one() -> None:
    w = weights(4100, 32)
    whole = quantise(w, 8, block=BLOCK)
    assert np.array_equal(whole.codes[4099:], quantise(w[4099:], 8, block=BLOCK).codes)
