"""A node for tests: a cache, and its host tier as other nodes see it."""

from dataclasses import dataclass

from cachemgr import BlockHash, HostCache
from cachemgr.host_contract import HeldShard, HostStore
from tests.cachemgr.copier import copy_shards, store_of
from tests.cachemgr.host import Host, payload_of


@dataclass(frozen=True, slots=True)
class Node:
    cache: HostCache
    store: HostStore

    def give(self, other: "Node", names: list[BlockHash]) -> int:
        """Copy blocks to another node; how many are there then."""
        return copy_shards(self.store, other.store, names)

    def hold_one(self, name: BlockHash) -> HeldShard:
        (held,) = self.store.hold([name])
        assert held is not None
        return held

    def has(self, name: BlockHash) -> bool:
        return not self.store.missing([name])


def open_node(host: Host, node: str, **options: object) -> Node:
    stores: list[HostStore] = []
    cache = host.open(node=node, remote=store_of(stores), **options)  # type: ignore[arg-type]
    return Node(cache, stores[0])


def is_whole(held: HeldShard) -> bool:
    """True if the bytes are those that a block of this name has in tests."""
    return bytes(held.payload) == payload_of(held.address.hash).tobytes()
