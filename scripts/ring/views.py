"""What of a ring people want to see: shares, vnodes held, versions, places of hashes."""

import re
from collections import Counter

import numpy as np

from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId, Ring, RingState, Version, home_of, position_of
from scripts.errors import UsageError

_WHOLE = 1 << 64
_HASH = re.compile(r"[0-9a-fA-F]{32}")
_PREFIX = re.compile(r"[0-9a-fA-F]{16,32}")
_POSITION = re.compile(r"[0-9]{1,20}|0x[0-9a-fA-F]{1,16}")


def version_text(version: Version) -> str:
    """`7 (1f2e3d4c)`: epoch, and enough of the digest to tell two rings of one epoch apart."""
    return f"{version.epoch} ({version.digest.hex()[:8]})"


def share(ring: Ring, node: NodeId) -> float:
    """The part of the ring whose primary is `node`, 0 … 1."""
    low, high = ring.arcs(node, 1)
    return (float(np.sum(high - low, dtype=np.float64)) + len(low)) / _WHOLE


def held_vnodes(state: RingState) -> Counter[str]:
    """How many vnodes each node has, with those that were moved to it and without those moved away."""
    held = Counter({node.id: node.vnodes for node in state.nodes})
    placed = {node.id for node in state.nodes if not node.draining}
    for vnode, target in state.overrides.items():
        home = home_of(vnode)
        if home in placed and target in placed:  # else without effect
            held[home] -= 1
            held[target] += 1
    return held


def position_from(text: str) -> int:
    """Of a segment's hash (32 hex digits), or the position itself (decimal, or hex after 0x)."""
    if _HASH.fullmatch(text):
        return position_of(BlockHash(bytes.fromhex(text)))
    if _POSITION.fullmatch(text) and (position := int(text, 0) if text[:2] == "0x" else int(text)) < _WHOLE:
        return position
    raise UsageError(
        f"{text!r} is no hash and no position: give 32 hex digits of a segment's hash, or a number below 2^64"
    )


def hash_from(text: str) -> bytes:
    """A block hash, or the first bytes of one, at least the 8 that say where it lies."""
    if not _PREFIX.fullmatch(text) or len(text) % 2:
        raise UsageError(
            f"{text!r} is no block hash: give its 32 hex digits, or at least the first 16 of a segment's"
        )
    return bytes.fromhex(text)
