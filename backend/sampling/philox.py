"""Philox4x32-10: one uniform per (seed, position); a row's randomness needs no state and no neighbours.

Counter-based generator of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
2011). Key = the 64-bit seed (low word first), counter = (position low, position high, 0, 0).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

_ROUNDS: Final = 10
_MULTIPLIERS: Final = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL: Final = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint32)
_LOW: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)

Words = npt.NDArray[np.uint32]


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds over columns: counter uint32 [4, n], key uint32 [2, n] → uint32 [4, n]."""
    multiplied, mixed = counter[0::2], counter[1::2]
    keys = key
    for _ in range(_ROUNDS):
        product = multiplied * _MULTIPLIERS  # uint64 [2, n]: high words feed the other pair, low words stay
        high = (product >> _SHIFT).astype(np.uint32)[::-1]
        low = product.astype(np.uint32)[::-1]
        multiplied, mixed = high ^ mixed ^ keys, low
        keys = keys + _WEYL  # wraps by design
    return np.concatenate((multiplied[:1], mixed[:1], multiplied[1:], mixed[1:]))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One double in [0, 1) with 53 random bits for each pair; arrays of the same shape [n]."""
    counter = np.zeros((4, len(seeds)), dtype=np.uint32)
    counter[0] = positions & _LOW
    counter[1] = positions >> _SHIFT
    key = np.empty((2, len(seeds)), dtype=np.uint32)
    key[0] = seeds & _LOW
    key[1] = seeds >> _SHIFT
    words = philox4x32(counter, key)
    doubles: npt.NDArray[np.float64] = ((words[0] >> 5) * 67108864.0 + (words[1] >> 6)) / 9007199254740992.0
    return doubles
