"""How nodes, vnodes and versions of the ring are called, and where a segment is placed."""

from typing import NamedTuple, NewType

from cachemgr.contract import BlockHash

NodeId = NewType("NodeId", str)
"""1 to 63 of a-z, 0-9, dot and hyphen."""

VnodeId = NewType("VnodeId", str)
"""`node#i`: vnode i of its home node, wherever it was moved."""

Epoch = NewType("Epoch", int)
"""Counts the changes of a cluster's ring, from 1."""


class Version(NamedTuple):
    """Which ring: ordered, and the higher one wins everywhere."""

    epoch: int
    digest: bytes
    """16 bytes: BLAKE2b-128 of the ring's canonical encoding."""

    def __str__(self) -> str:
        return f"epoch {self.epoch} ({self.digest.hex()[:8]})"


def vnode_id(home: str, number: int) -> VnodeId:
    """The name of vnode `number` of a node."""
    return VnodeId(f"{home}#{number}")


def position_of(segment: BlockHash) -> int:
    """Where a segment lies on the ring of 2^64 positions: the first 8 bytes of its hash, little endian."""
    return int.from_bytes(segment[:8], "little")
