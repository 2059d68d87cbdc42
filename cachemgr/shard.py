"""A shard is the bytes of one block of one tensor-parallel rank: a 128-byte header, then the payload.

    0 u32 length   4 u32 align   8 magic "TCKV"  12 version  13 dtype  14 rank  15 ranks  16 layers  17 zero
    18 u16 heads  20 u16 head_dim  22 u16 tokens  24 u32 block index in its chain  28 u32 key_id
    32 block hash (16)  48 parent hash (16)  64 segment hash (16)  80 kv_identity (first 8)
    88 u64 sequence  96 writer session (16)  112 tag (16)          all little endian

The tag is AES-256-GMAC over bytes 0–111 and then the payload. Its key is HKDF(tag secret[key_id], session),
its nonce 4 zero bytes and the sequence. GMAC is broken by one repeated nonce under one key, so a session is
16 fresh random bytes per sealer, a sequence is taken once, and a forked child may not seal. A sealer has one
tag secret: after a rotation there is another sealer, with a session of its own.

A segment is 16 consecutive blocks; its hash is that of its first block, its number is block index // 16.
The parent of a first block is zero. Tags give authenticity, not secrecy.
"""

import itertools
import os
import struct
from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher, algorithms, modes

from cachemgr.contract import BlockFormat, BlockHash
from cachemgr.keys import derive_key, encode_fields

HEADER_NBYTES = 128
TAGGED_NBYTES = 112
ALIGN = 128
MAGIC = b"TCKV"
MAGIC_OFFSET = 8
VERSION = 1
SEGMENT_BLOCKS = 16
NO_PARENT = BlockHash(bytes(16))
SESSION_NBYTES = 16

HEADER_DTYPE = np.dtype(
    [
        ("length", "<u4"), ("align", "<u4"), ("magic", "V4"), ("version", "u1"), ("dtype", "u1"),
        ("rank", "u1"), ("ranks", "u1"), ("layers", "u1"), ("zero", "u1"), ("heads", "<u2"),
        ("head_dim", "<u2"), ("tokens", "<u2"), ("index", "<u4"), ("key_id", "<u4"), ("hash", "V16"),
        ("parent", "V16"), ("segment", "V16"), ("identity", "V8"), ("sequence", "<u8"), ("session", "V16"),
        ("tag", "V16"),
    ]
)  # fmt: skip

_TAGGED = struct.Struct("<II4sBBBBBBHHHII16s16s16s8sQ16s")
_ADDRESS = struct.Struct("<II16s16s16s")
_ADDRESS_OFFSET = 24
_GEOMETRY_FIELDS = ("dtype", "rank", "ranks", "layers", "zero", "heads", "head_dim", "tokens")
_DTYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3}
_TAG_PURPOSE = b"tensorcache/shard-tag/1"
_TAG_SESSION = 0x01
_FORMAT_IDENTITY, _FORMAT_GEOMETRY = 0x01, 0x02
_KEPT_SESSION_KEYS = 1024

assert (_TAGGED.size, HEADER_DTYPE.itemsize) == (TAGGED_NBYTES, HEADER_NBYTES)


class Verdict(Enum):
    """What a check says: use it, leave it alone, or remove it."""

    WHOLE = "whole"
    UNREADABLE = "unreadable"
    """Of a version or a key id this process does not know: a miss, but perhaps good for another one."""
    CORRUPT = "corrupt"
    """Wrong under a known version and key: a miss, to be removed."""


class BlockAddress(msgspec.Struct, frozen=True, gc=False):
    """Where a block stands in its chain. Made by the hundred thousand, hence no dataclass."""

    hash: BlockHash
    parent: BlockHash
    segment: BlockHash
    index: int


def address_of(hashes: Sequence[BlockHash], index: int) -> BlockAddress:
    """The address of block `index` of the chain `hashes`."""
    parent = hashes[index - 1] if index else NO_PARENT
    return BlockAddress(hashes[index], parent, hashes[index - index % SEGMENT_BLOCKS], index)


def address_in(header: bytes) -> BlockAddress | None:
    """Where the block of a header stands, as the header says, unchecked; None if it is no header."""
    if len(header) != HEADER_NBYTES or header[MAGIC_OFFSET : MAGIC_OFFSET + len(MAGIC)] != MAGIC:
        return None
    index, _, name, parent, segment = _ADDRESS.unpack_from(header, _ADDRESS_OFFSET)
    return BlockAddress(BlockHash(name), BlockHash(parent), BlockHash(segment), index)


def slot_nbytes(payload_nbytes: int) -> int:
    """Header and payload, padded with zeros to a multiple of 128."""
    return HEADER_NBYTES + -(-payload_nbytes // ALIGN) * ALIGN


def geometry_fields(block_format: BlockFormat, *, rank: int = 0, ranks: int = 1) -> tuple[int, ...]:
    """Dtype, rank, ranks, layers, zero, heads, head_dim, tokens as the header holds them.

    ValueError if one does not fit.
    """
    f = block_format
    if f.dtype not in _DTYPE_CODES:
        raise ValueError(f"dtype: must be one of {', '.join(_DTYPE_CODES)}, got {f.dtype!r}")
    fields = (_DTYPE_CODES[f.dtype], rank, ranks, f.layers, 0, f.kv_heads, f.head_dim, f.block_tokens)
    limits = (0xFF, 0xFF, 0xFF, 0xFF, 0, 0xFFFF, 0xFFFF, 0xFFFF)
    if not 0 <= rank < ranks or any(value > limit for value, limit in zip(fields, limits, strict=True)):
        raise ValueError(f"block format: {f} of rank {rank}/{ranks} does not fit a shard header")
    if min(f.layers, f.kv_heads, f.head_dim, f.block_tokens) < 1 or len(f.kv_identity) != 16:
        raise ValueError(f"block format: sizes must be ≥ 1 and kv_identity 16 bytes, got {f}")
    return fields


def format_id(block_format: BlockFormat) -> bytes:
    """16 bytes that are equal where blocks can be exchanged: of one identity and geometry."""
    geometry = b"".join(field.to_bytes(4, "little") for field in geometry_fields(block_format))
    fields = encode_fields([(_FORMAT_IDENTITY, block_format.kv_identity), (_FORMAT_GEOMETRY, geometry)])
    return blake2b(fields, digest_size=16).digest()


class ShardSealer:
    """Writes headers: gives every shard a fresh sequence of this session and its tag.

    `tags`: tag secrets by key id; the highest seals. Any thread of one process.
    """

    def __init__(
        self, block_format: BlockFormat, tags: Mapping[int, bytes], *, session: bytes | None = None
    ) -> None:
        self._geometry = geometry_fields(block_format)
        self._identity = block_format.kv_identity[:8]
        self._length = block_format.payload_nbytes
        self._key_id = max(tags)
        self._session = session or os.urandom(SESSION_NBYTES)
        self._key = _session_key(tags[self._key_id], self._session)
        self._sequence = itertools.count(1)
        self._pid = os.getpid()

    def seal(self, address: BlockAddress, payload: npt.NDArray[np.uint8]) -> bytes:
        """The 128 header bytes for `payload` at `address`."""
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process may not seal shards: it would repeat its parent's nonces")
        sequence = next(self._sequence)
        tagged = _TAGGED.pack(
            self._length, ALIGN, MAGIC, VERSION, *self._geometry, address.index, self._key_id,
            address.hash, address.parent, address.segment, self._identity, sequence, self._session,
        )  # fmt: skip
        tagger = _tagger(self._key, sequence)
        tagger.authenticate_additional_data(tagged)
        tagger.authenticate_additional_data(payload.data)
        tagger.finalize()
        return tagged + tagger.tag


class ShardCheck:
    """A check under way: feed it the payload in pieces while they are hot, then ask `passed`."""

    __slots__ = ("_tag", "_tagger", "update")

    def __init__(self, tagger: AEADEncryptionContext, header: bytes) -> None:
        self._tagger = tagger
        self._tag = header[TAGGED_NBYTES:]
        self.update = tagger.authenticate_additional_data
        self.update(header[:TAGGED_NBYTES])

    def passed(self) -> bool:
        """True if the tag is that of the header and of everything fed."""
        self._tagger.finalize()
        return compare_digest(self._tagger.tag, self._tag)


class TagKeys:
    """Tag secrets that open shards, and the keys of sessions under them; replaced as a whole. Any thread."""

    __slots__ = ("_sessions", "_tags", "ids")

    def __init__(self, tags: Mapping[int, bytes]) -> None:
        self._tags = dict(tags)
        self.ids = np.fromiter(self._tags, np.uint32)
        self._sessions: dict[tuple[int, bytes], bytes] = {}

    def __contains__(self, key_id: int) -> bool:
        return key_id in self._tags

    def of_session(self, key_id: int, session: bytes) -> bytes:
        """The key of a session under a key id that is here."""
        key = self._sessions.get((key_id, session))
        if key is None:
            key = _session_key(self._tags[key_id], session)
            if len(self._sessions) >= _KEPT_SESSION_KEYS:  # forged sessions must not grow this without bound
                self._sessions.clear()
            self._sessions[key_id, session] = key
        return key


class ShardOpener:
    """Judges shards of one block format: identity first, then name and place, then the tag.

    Any thread; what one call says is said under the tag secrets of one moment.
    """

    def __init__(self, block_format: BlockFormat, tags: Mapping[int, bytes]) -> None:
        self._geometry = geometry_fields(block_format)
        self._identity = block_format.kv_identity[:8]
        self._length = block_format.payload_nbytes
        self._keys = TagKeys(tags)

    def use(self, tags: Mapping[int, bytes]) -> None:
        """From now on these tag secrets open shards, and no others: those of any other key id are unreadable.

        Whoever asks `readable` and `unreadable` about the same headers does so on the thread that calls this.
        """
        self._keys = TagKeys(tags)

    def begin(self, header: bytes, address: BlockAddress) -> ShardCheck | Verdict:
        """Judge a private copy of a header; a ShardCheck if all that is left is the tag."""
        if len(header) != HEADER_NBYTES:
            return Verdict.CORRUPT
        (length, align, magic, version, *geometry, index, key_id,
         name, parent, segment, identity, sequence, session) = _TAGGED.unpack_from(header)  # fmt: skip
        keys = self._keys
        if magic != MAGIC:
            return Verdict.CORRUPT
        if version != VERSION:
            return Verdict.UNREADABLE
        if identity != self._identity:
            return Verdict.CORRUPT
        if key_id not in keys:
            return Verdict.UNREADABLE
        shape = (length, align, tuple(geometry))
        place = (name, parent, segment, index)
        if shape != (self._length, ALIGN, self._geometry):
            return Verdict.CORRUPT
        if place != (address.hash, address.parent, address.segment, address.index):
            return Verdict.CORRUPT
        return ShardCheck(_tagger(keys.of_session(key_id, session), sequence), header)

    def readable(self, headers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of `headers` (HEADER_DTYPE, [N]) may be indexed: shape and key known, tags unchecked."""
        known_version = (headers["version"] == VERSION) & self._known_key(headers)
        fits: npt.NDArray[np.bool_] = self.published(headers) & known_version
        fits &= (headers["align"] == ALIGN) & (headers["length"] == self._length)
        for name, value in zip(_GEOMETRY_FIELDS, self._geometry, strict=True):
            fits &= headers[name] == value
        return fits

    def unreadable(self, headers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of `headers` are published but of a version or key id this process does not know."""
        strange: npt.NDArray[np.bool_] = (headers["version"] != VERSION) | ~self._known_key(headers)
        return self.published(headers) & strange

    def published(self, headers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of `headers` carry the magic."""
        words = np.ascontiguousarray(headers["magic"]).view("<u4")
        return np.equal(words, int.from_bytes(MAGIC, "little"))

    def _known_key(self, headers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        known: npt.NDArray[np.bool_] = np.isin(headers["key_id"], self._keys.ids)
        return known


def _session_key(tag_secret: bytes, session: bytes) -> bytes:
    return derive_key(tag_secret, purpose=_TAG_PURPOSE, context=encode_fields([(_TAG_SESSION, session)]))


def _tagger(key: bytes, sequence: int) -> AEADEncryptionContext:
    nonce = bytes(4) + sequence.to_bytes(8, "little")
    return Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
