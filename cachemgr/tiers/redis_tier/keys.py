"""What a block is called in Redis: under the cluster's id, together with the rest of its segment.

    <cluster>:kv:{<segment hash>}:<format id>:<block hash>          the hashes in hex

Redis Cluster places keys by what stands in braces, so a segment is one server's, and asked for at once. An
ACL holds a user to `<cluster>:kv:*`.
"""

from collections.abc import Sequence

from cachemgr.contract import BlockHash
from cachemgr.shard import BlockAddress


def key_prefix(cluster: str) -> str:
    """What every key of a cluster's blocks begins with."""
    return f"{cluster}:kv:"


def segment_tag(segment: BlockHash) -> bytes:
    """What of a segment's keys a Redis Cluster places by."""
    return segment.hex().encode()


def probe_key(cluster: str) -> bytes:
    """A key that is never there, for seeing whether anybody answers."""
    return f"{key_prefix(cluster)}probe".encode()


class BlockKeys:
    """Keys of the blocks of one cluster and one block format."""

    def __init__(self, cluster: str, format_id: bytes) -> None:
        self._prefix = key_prefix(cluster).encode() + b"{"
        self._middle = b"}:" + format_id.hex().encode() + b":"

    def key(self, block: BlockAddress) -> bytes:
        """The block's key."""
        return self._prefix + segment_tag(block.segment) + self._middle + block.hash.hex().encode()

    def keys(self, blocks: Sequence[BlockAddress]) -> list[bytes]:
        """The key of each."""
        return [self.key(block) for block in blocks]
