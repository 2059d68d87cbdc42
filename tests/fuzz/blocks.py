"""Two nodes of this process for targets that bring blocks: `near` has a prompt's, `far` has none of them."""

import functools
from dataclasses import dataclass

from cachemgr.contract import BlockHash
from cachemgr.shard import HEADER_NBYTES, BlockAddress, address_of
from tests.cachemgr.host import FORMAT, Host, chain, fill, payload_of
from tests.cachemgr.node import Node, open_node
from tests.fuzz.contract import scratch

BLOCKS = 8
HELD = 5
"""Of the chain's blocks, those that `near` has."""
SHARD_NBYTES = HEADER_NBYTES + FORMAT.payload_nbytes


@dataclass(frozen=True)
class Nodes:
    near: Node
    far: Node
    names: list[BlockHash]
    addresses: list[BlockAddress]

    def reset(self) -> None:
        """As at first."""
        self.far.store.drop(self.names)
        self.near.store.drop(self.names[HELD:])

    def check(self) -> None:
        """Whatever came: no foreign bytes, nothing lost, nothing left pinned or reserved."""
        for node in (self.near, self.far):
            shards = node.store.hold(self.names)
            for shard, name in zip(shards, self.names, strict=True):
                if shard is not None:
                    assert shard.address.hash == name
                    assert bytes(shard.payload) == payload_of(name).tobytes(), "foreign bytes"
            node.store.let_go([shard for shard in shards if shard is not None])
            assert node.cache.counters()["cache_pins"] == 0
            assert not node.cache._tier.table._state.index._reserved
        assert self.near.store.missing(self.names[:HELD]) == [], "a stranger removed a block"

    def shard(self, index: int) -> bytes:
        """Header and payload of one that `near` has."""
        held = self.near.hold_one(self.names[index])
        data = held.header + bytes(held.payload)
        self.near.store.let_go([held])
        return data


@functools.cache
def nodes() -> Nodes:
    folder = scratch() / "arenas"
    folder.mkdir()
    host = Host(folder)
    near, far = (open_node(host, name, blocks=4 * BLOCKS) for name in ("near", "far"))
    names = chain(near.cache, BLOCKS)
    fill(near.cache, names)
    made = Nodes(near, far, names, [address_of(names, index) for index in range(BLOCKS)])
    made.reset()
    return made


@functools.cache
def more_shards() -> tuple[bytes, ...]:
    """Whole shards of those that `near` has not: what an honest peer would give it."""
    folder = scratch() / "third"
    folder.mkdir()
    third = open_node(Host(folder), "third", blocks=2 * BLOCKS)
    names = nodes().names
    fill(third.cache, names)
    found = []
    for name in names[HELD:]:
        held = third.hold_one(name)
        found.append(held.header + bytes(held.payload))
        third.store.let_go([held])
    third.cache.close()
    return tuple(found)
