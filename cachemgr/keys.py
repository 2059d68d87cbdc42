"""Derives keys bound to one purpose, and encodes fields so that no two lists of them look the same."""

from collections.abc import Iterable

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_NBYTES = 32


def encode_fields(fields: Iterable[tuple[int, bytes]]) -> bytes:
    """Fields as tag (u8), length (u32 LE), bytes: moving a border between two of them changes the result."""
    return b"".join(bytes((tag,)) + len(data).to_bytes(4, "little") + data for tag, data in fields)


def encode_text(text: str) -> bytes:
    """UTF-8, total and injective: lone surrogates, which JSON lets through, keep an encoding of their own."""
    return text.encode("utf-8", "surrogatepass")


def derive_key(secret: bytes, *, purpose: bytes, context: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) of `secret`: 32 bytes that belong to one purpose and one context."""
    return HKDF(algorithm=hashes.SHA256(), length=KEY_NBYTES, salt=purpose, info=context).derive(secret)
