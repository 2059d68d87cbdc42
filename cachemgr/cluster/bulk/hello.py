"""The first bytes of a bulk connection: who comes with which ticket, and which wire version is spoken.

    client: "TCBK"  u8 lowest version  u8 highest version  ticket (32)  node id (64, zero-padded)
    server: "TCBK"  u8 version spoken (0: none)  u8 reason  node id (64, zero-padded)

Both have a fixed length, so that nobody reads what a stranger says he will send.
"""

import struct
from typing import NamedTuple

from cachemgr.cluster.bulk.frames import MalformedFrame
from cachemgr.ring import NodeId

TICKET_NBYTES = 32
WIRE_VERSIONS = (1, 2)
"""Lowest and highest that this release speaks. 2 added `hot` to END, and CORRUPT."""

WELCOME, BAD_TICKET, NO_VERSION, FULL = range(4)
REASONS = {
    BAD_TICKET: "the ticket is not valid",
    NO_VERSION: "no wire version in common",
    FULL: "too many connections",
}

_MAGIC = b"TCBK"
_HELLO = struct.Struct("<4sBB32s64s")
_WELCOME = struct.Struct("<4sBB64s")
HELLO_NBYTES = _HELLO.size
WELCOME_NBYTES = _WELCOME.size


class Hello(NamedTuple):
    """What a client says first."""

    versions: tuple[int, int]
    ticket: bytes
    node: NodeId


class Welcome(NamedTuple):
    """What a server answers: `reason` is WELCOME, or why there is no connection."""

    version: int
    reason: int
    node: NodeId


def pack_hello(hello: Hello) -> bytes:
    """Fixed length, HELLO_NBYTES."""
    return _HELLO.pack(_MAGIC, *hello.versions, hello.ticket, hello.node.encode())


def parse_hello(data: bytes) -> Hello:
    """MalformedFrame if it is none."""
    magic, low, high, ticket, node = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise MalformedFrame("magic", repr(_MAGIC), magic)
    return Hello((low, high), ticket, _node_id(node))


def pack_welcome(welcome: Welcome) -> bytes:
    """Fixed length, WELCOME_NBYTES."""
    return _WELCOME.pack(_MAGIC, welcome.version, welcome.reason, welcome.node.encode())


def parse_welcome(data: bytes) -> Welcome:
    """MalformedFrame if it is none."""
    magic, version, reason, node = _WELCOME.unpack(data)
    if magic != _MAGIC:
        raise MalformedFrame("magic", repr(_MAGIC), magic)
    if reason not in (WELCOME, *REASONS):
        raise MalformedFrame("reason", f"up to {max(REASONS)}", reason)
    return Welcome(version, reason, _node_id(node))


def common_version(ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """The highest that both speak; 0 if there is none."""
    version = min(ours[1], theirs[1])
    return version if version >= max(ours[0], theirs[0], 1) else 0


def _node_id(padded: bytes) -> NodeId:
    try:
        return NodeId(padded.rstrip(b"\0").decode("ascii"))
    except UnicodeDecodeError:
        raise MalformedFrame("node id", "ascii", padded) from None
