"""Where the vnodes of a node lie on the ring, the same on every node forever.

Points are MurmurHash3 x64 128 (Austin Appleby), of which the first 8 bytes count, little endian. It is spread
evenly, and no secret: who may add nodes can choose where they lie.
"""

import mmh3
import numpy as np
import numpy.typing as npt

VNODES = 128
"""Vnodes of a node of weight 1."""

_HASH_NBYTES = 16


def vnode_count(weight: float) -> int:
    """128 × weight, halves rounded up, at least one."""
    return max(1, int(VNODES * weight + 0.5))


def vnode_points(home: str, count: int) -> npt.NDArray[np.uint64]:
    """The points of vnodes 0 … count − 1 of a node: uint64 [count], in that order."""
    prefix = f"{home}#"
    digest = mmh3.mmh3_x64_128_digest
    hashes = b"".join([digest(f"{prefix}{number}".encode()) for number in range(count)])
    return np.frombuffer(hashes, "<u8")[:: _HASH_NBYTES // 8].astype(np.uint64)


def rehashed(segment: bytes, turn: int) -> int:
    """Another position for a segment: that of its hash with the suffix `#turn`."""
    return int.from_bytes(mmh3.mmh3_x64_128_digest(segment + b"#%d" % turn)[:8], "little")
