"""The frames of the bulk channel: what may travel, how long it may be, and the trouble a peer can be.

    0 u32 length of the body   4 u8 kind   5 zeros (3)   8 u32 request          little endian, then the body

    client → server                              server → client
    GET, PUT       a request (bulk_messages)     PLACES    where the blocks lie (same host)
    BLOCK, SLICE   a block of a put              BLOCK, SLICE   a block of a get
    ABSENT         blocks of a put that are gone ABSENT    blocks of a get that are not here
    LEASE          blocks read in place          WANT      blocks of a put that are missing here
    CANCEL         nobody waits any more         ACK       one block of a put: taken or not
    CORRUPT        a block failed its check      END       the last frame of every request
    RING           a newer ring                  RING      a newer ring
                                                 GOAWAY    no new requests, please

A block is one BLOCK frame (u32 index in the request, the shard's header, the first slice of its payload) and
as many SLICE frames as it takes. Frames of different requests alternate; those of one request come in order.

Invariant: a length is judged before anything is allocated or reserved for it.
"""

import struct
from collections.abc import Mapping
from typing import Literal, NamedTuple

from cachemgr.errors import CacheError
from cachemgr.shard import HEADER_NBYTES

GET, PUT, BLOCK, SLICE, ABSENT, LEASE, CANCEL, CORRUPT, RING = range(1, 10)
PLACES, WANT, ACK, END, GOAWAY = range(10, 15)

SLICE_NBYTES = 4 << 20
REQUEST_BLOCKS = 1024
"""Blocks one request may name."""
BLOCK_META = struct.Struct("<I")
BLOCK_META_NBYTES = BLOCK_META.size + HEADER_NBYTES
RUN = struct.Struct("<II")
"""Body of ABSENT: first index, count."""
COUNT = struct.Struct("<I")
"""Body of LEASE: how many of its blocks are read by now."""
ACKED = struct.Struct("<IB")
"""Body of ACK: index, taken."""
CORRUPT_NBYTES = 32
"""Body of CORRUPT: format id, name."""
INDEX_NBYTES = 4
"""An index in WANT."""

_LIMITS: Mapping[int, tuple[int, int]] = {
    GET: (1, 64 << 10),
    PUT: (1, 64 << 10),
    BLOCK: (BLOCK_META_NBYTES, BLOCK_META_NBYTES + SLICE_NBYTES),
    SLICE: (1, SLICE_NBYTES),
    ABSENT: (RUN.size, RUN.size),
    LEASE: (COUNT.size, COUNT.size),
    CANCEL: (0, 0),
    CORRUPT: (CORRUPT_NBYTES, CORRUPT_NBYTES),
    RING: (1, 4 << 20),
    PLACES: (1, 256 << 10),
    WANT: (0, INDEX_NBYTES * REQUEST_BLOCKS),
    ACK: (ACKED.size, ACKED.size),
    END: (1, 64 << 10),
    GOAWAY: (0, 0),
}  # fmt: skip

FROM_CLIENT = frozenset((GET, PUT, BLOCK, SLICE, ABSENT, LEASE, CANCEL, CORRUPT, RING))
FROM_SERVER = frozenset((PLACES, BLOCK, SLICE, ABSENT, WANT, ACK, END, RING, GOAWAY))

_HEAD = struct.Struct("<IB3sI")
HEAD_NBYTES = _HEAD.size
_SHOWN = 200

TroubleKind = Literal[
    "refused", "silent", "broken", "malformed", "foreign", "corrupt", "busy", "versions", "plaintext"
]


class PeerTrouble(CacheError):
    """A peer did not do what was asked of it; what had arrived whole before stays published.

    kind       refused (no connection, ticket or store), silent (no answer in time), broken (connection lost),
               malformed (no frame of ours), foreign (another block than asked), corrupt (wrong tag), busy,
               versions (no wire version in common), plaintext (TLS is needed there)
    clean      the connection is good for other requests: nothing that a breaker should count
    arrived    per asked block: in the store now (`get`), acknowledged (`put`)
    """

    def __init__(self, kind: TroubleKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind: TroubleKind = kind
        self.detail = detail
        self.arrived: tuple[bool, ...] = ()

    @property
    def clean(self) -> bool:
        """True if the peer is well and only has no time for us."""
        return self.kind == "busy"


class MalformedFrame(CacheError):
    """Bytes that no peer of ours sends; the text names field, limit and value, of a long one the start."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        shown = repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}…"
        super().__init__(f"bulk frame: {field} must be {limit}, got {shown}")


class Head(NamedTuple):
    """What stands in front of a body."""

    length: int
    kind: int
    request: int


def pack_head(kind: int, request: int, length: int) -> bytes:
    """The twelve bytes in front of a body of `length` bytes."""
    return _HEAD.pack(length, kind, b"", request)


def pack_frame(kind: int, request: int, body: bytes = b"") -> bytes:
    """A small frame whole."""
    return _HEAD.pack(len(body), kind, b"", request) + body


def parse_head(data: bytes | bytearray, accepted: frozenset[int]) -> Head:
    """Judge a head; MalformedFrame unless its kind is one of `accepted` and its length within that kind's
    limits.
    """
    length, kind, zeros, request = _HEAD.unpack(data)
    if kind not in accepted:
        raise MalformedFrame("kind", f"one of {sorted(accepted)}", kind)
    low, high = _LIMITS[kind]
    if not low <= length <= high:
        raise MalformedFrame(f"length of kind {kind}", f"{low} to {high}", length)
    if zeros != b"\0\0\0":
        raise MalformedFrame("padding", "zero", zeros)
    return Head(length, kind, request)
