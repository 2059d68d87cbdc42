"""How a block lies in LMDB: one small record under its key, and its payload in pieces of equal size.

    blocks    key (16)              → u64 stamp, the shard's header (128)
    pieces    key (16), u16 number  → up to 1,052,656 bytes of payload

Records are small and lie together, so a start reads them without touching a payload. A whole piece takes
exactly 257 pages of LMDB, whatever the format of the block, so what one block leaves another can use.
A key is the block's name XOR the id of its format: whoever asks for another format finds nothing.
A stamp is never given twice: whoever found a block wrong names it, and what replaced it stays.
"""

from collections.abc import Callable

import numpy as np

from cachemgr.contract import BlockHash
from cachemgr.shard import HEADER_DTYPE, HEADER_NBYTES

STAMP_NBYTES = 8
MOST_STAMP = 2**63
"""No writer ever comes so far. Beyond, the next stamps would soon not fit."""
RECORD_NBYTES = STAMP_NBYTES + HEADER_NBYTES
RECORD_DTYPE = np.dtype([("stamp", "<u8"), ("header", HEADER_DTYPE)])

PAGE_NBYTES = 4096
PIECE_NBYTES = (1 << 20) + PAGE_NBYTES - 16
"""16 bytes of the first page are LMDB's; a payload of 1 MiB is one piece."""

_NODE_NBYTES = 512
"""What the tree takes for a record and a key, with leaves three quarters full; of each piece a quarter."""
_IN_LEAF_NBYTES = 2000
"""LMDB keeps smaller values in the leaf."""

assert RECORD_DTYPE.itemsize == RECORD_NBYTES


def keys_of(format_id: bytes) -> Callable[[BlockHash], BlockHash]:
    """What makes a key of the name of a block of this format."""
    mask = int.from_bytes(format_id, "little")

    def key(name: BlockHash) -> BlockHash:
        return BlockHash((int.from_bytes(name, "little") ^ mask).to_bytes(16, "little"))

    return key


def piece_key(key: bytes, number: int) -> bytes:
    """Where piece `number` of a block is."""
    return key + number.to_bytes(2, "big")


def disk_nbytes(payload_nbytes: int) -> int:
    """About what a block takes of the file."""
    whole, rest = divmod(payload_nbytes, PIECE_NBYTES)
    nbytes = _NODE_NBYTES + whole * (PIECE_NBYTES + 16 + _NODE_NBYTES // 4)
    if rest > _IN_LEAF_NBYTES:
        nbytes += -(-(rest + 16) // PAGE_NBYTES) * PAGE_NBYTES
    return nbytes + (rest if rest <= _IN_LEAF_NBYTES else 0) * 3 // 2
