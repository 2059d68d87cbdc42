"""Names, addresses and arcs as flat bytes: thousands of them in a message, checked by their length alone.

An address is segment (16), index in the chain (u32, big endian), hash (16), parent (16): sorted, they
stand segment by segment, each from its beginning. A cursor is the first 36 bytes of a part's last address.
"""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.errors import CacheError
from cachemgr.shard import BlockAddress

MAX_NAMES = 4096
"""Names or addresses of one message."""

MAX_ARCS_NBYTES = 2 << 20
"""Of the lower ends, and of the upper ends: 262,144 arcs."""

NAME_NBYTES = 16
ADDRESS_NBYTES = 52
CURSOR_NBYTES = 36
MAX_CURSOR_NBYTES = 64

_ADDRESS = struct.Struct(">16sI16s16s")
_ABSENT = bytes(ADDRESS_NBYTES)

assert _ADDRESS.size == ADDRESS_NBYTES


class MessageError(CacheError):
    """Bytes that are no message of the kind expected."""


def pack_names(names: Sequence[BlockHash]) -> bytes:
    """One after the other. ValueError if one is not 16 bytes."""
    data = b"".join(names)
    if len(data) != len(names) * NAME_NBYTES:
        raise ValueError(f"names: each must be {NAME_NBYTES} bytes")
    return data


def unpack_names(data: bytes) -> list[BlockHash]:
    """MessageError unless whole names."""
    _whole(data, NAME_NBYTES, field="names")
    return [BlockHash(data[at : at + NAME_NBYTES]) for at in range(0, len(data), NAME_NBYTES)]


def pack_address(address: BlockAddress) -> bytes:
    """52 bytes."""
    return _ADDRESS.pack(address.segment, address.index, address.hash, address.parent)


def pack_addresses(addresses: Iterable[BlockAddress | None]) -> bytes:
    """One after the other, zeros for None."""
    return b"".join(_ABSENT if address is None else pack_address(address) for address in addresses)


def unpack_addresses(data: bytes) -> list[BlockAddress | None]:
    """MessageError unless whole addresses."""
    _whole(data, ADDRESS_NBYTES, field="addresses")
    return [
        BlockAddress(BlockHash(name), BlockHash(parent), BlockHash(segment), index) if any(name) else None
        for segment, index, name, parent in _ADDRESS.iter_unpack(data)
    ]


def pack_arcs(ends: npt.NDArray[np.uint64]) -> bytes:
    """Lower or upper ends, little endian."""
    return ends.astype("<u8").tobytes()


def unpack_arcs(low: bytes, high: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """MessageError unless sorted, disjoint arcs, as many lower ends as upper ones."""
    _whole(low, 8, field="low")
    if len(low) != len(high):
        raise MessageError(f"high: must be as long as low ({len(low)} bytes), got {len(high)}")
    lows, highs = np.frombuffer(low, "<u8").astype(np.uint64), np.frombuffer(high, "<u8").astype(np.uint64)
    if (lows > highs).any() or (lows[1:] <= highs[:-1]).any():
        raise MessageError("low, high: must be sorted, disjoint arcs")
    return lows, highs


def _whole(data: bytes, nbytes: int, *, field: str) -> None:
    if len(data) % nbytes:
        raise MessageError(f"{field}: must be a multiple of {nbytes} bytes, got {len(data)}")
