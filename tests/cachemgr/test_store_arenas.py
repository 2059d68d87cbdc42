"""The host tier as other nodes see it, over arenas that are another process's, lost, or closed."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachemgr.cache
from cachemgr import BlockHash
from cachemgr.host_contract import IncomingShard
from cachemgr.shard import BlockAddress, Verdict, address_of, slot_nbytes
from tests.cachemgr.host import FORMAT, Host, chain, fill, payload_of, read
from tests.cachemgr.node import Node, is_whole, open_node

STRIDE = slot_nbytes(FORMAT.payload_nbytes)
EVERYWHERE = np.zeros(1, np.uint64), np.full(1, 2**64 - 1, np.uint64)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas are looked at only when the test says so."""
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 3600.0)


def position(segment: BlockHash) -> int:
    return int.from_bytes(segment[:8], "little")


def arcs(*pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    low, high = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(low, np.uint64), np.array(high, np.uint64)


def addresses(hashes: list[BlockHash]) -> list[BlockAddress]:
    return [address_of(hashes, index) for index in range(len(hashes))]


def by_name(blocks: list[BlockAddress]) -> list[BlockAddress]:
    return sorted(blocks, key=lambda block: block.hash)


def receive(node: Node, incoming: IncomingShard, source: Node) -> None:
    held = source.hold_one(incoming.address.hash)
    incoming.payload[:] = held.payload
    node.store.publish(incoming, held.header)
    source.store.let_go([held])


def test_residents_are_found_by_the_position_of_their_segment(host: Host) -> None:
    node = open_node(host, "node", blocks=128)
    chains = [chain(node.cache, 20, seed=seed) for seed in range(5)]
    for hashes in chains:
        fill(node.cache, hashes)
    blocks = [address for hashes in chains for address in addresses(hashes)]
    assert by_name(node.store.resident(*EVERYWHERE)) == by_name(blocks)
    assert node.store.resident(*arcs()) == []
    positions = sorted({position(block.segment) for block in blocks})
    edges = st.lists(st.sampled_from([p + d for p in positions for d in (-1, 0, 1)]), unique=True)

    @given(edges)
    def any_arcs(edges: list[int]) -> None:
        edges = sorted(edges)[: len(edges) // 2 * 2]
        pairs = list(zip(edges[::2], edges[1::2], strict=True))
        wanted = [block for block in blocks if any(a <= position(block.segment) <= b for a, b in pairs)]
        assert by_name(node.store.resident(*arcs(*pairs))) == by_name(wanted)

    any_arcs()


def test_residents_are_those_that_can_be_found(host: Host) -> None:
    node = open_node(host, "node", blocks=16, ttl_s=10.0)
    hashes = chain(node.cache, 6)
    fill(node.cache, hashes)
    host.clock.now += 6
    pending = node.cache.prepare(hashes, 5), node.cache.prepare(chain(node.cache, 1, seed=1), 0)
    assert pending[0] is None
    node.store.drop([hashes[4]])
    held = node.hold_one(hashes[3])
    node.store.reject(held, Verdict.UNREADABLE)
    assert by_name(node.store.resident(*EVERYWHERE)) == by_name([address_of(hashes, i) for i in (0, 1, 2, 5)])
    node.store.let_go([held])
    host.clock.now += 6
    assert node.store.resident(*EVERYWHERE) == []


def test_shards_of_the_nodes_other_processes_are_held_as_hints(host: Host, frozen: None) -> None:
    ours, theirs = (open_node(host, "node", blocks=32, arena_bytes=16 * STRIDE) for _ in range(2))
    hashes = chain(ours.cache, 5)
    fill(theirs.cache, hashes)
    ours.cache.lookup(hashes)
    ours.cache._refresh_arenas()
    assert ours.store.missing(hashes) == []
    assert ours.store.reserve(address_of(hashes, 2)) is None, "the node has it"
    held = ours.hold_one(hashes[2])
    assert is_whole(held)
    assert held.address == address_of(hashes, 2)
    assert Path(held.place.path).read_bytes()[held.place.offset :][:128] == held.header
    assert [each.cache.counters()["cache_pins"] for each in (ours, theirs)] == [0, 0]
    assert ours.store.resident(*EVERYWHERE) == []
    assert ours.store.drop(hashes) == 0
    ours.store.reject(held, Verdict.CORRUPT)
    assert ours.store.missing(hashes) == [2], "a hint that was wrong is forgotten"
    assert read(theirs.cache, hashes) == 5
    ours.store.let_go([held])


def test_a_hint_whose_slot_was_written_again_is_not_held(host: Host, frozen: None) -> None:
    ours, theirs = (open_node(host, "node", blocks=8, arena_bytes=4 * STRIDE) for _ in range(2))
    hashes = chain(ours.cache, 4)
    fill(theirs.cache, hashes)
    ours.cache.lookup(hashes)
    ours.cache._refresh_arenas()
    fill(theirs.cache, chain(ours.cache, 4, seed=1))
    assert ours.store.hold(hashes) == [None] * 4
    assert ours.store.missing(hashes) == [0, 1, 2, 3]
    assert ours.cache.counters()["cache_stale_blocks_total"] == 4


def test_bytes_in_our_arena_that_are_another_block_are_not_held(host: Host) -> None:
    node = open_node(host, "node", blocks=4)
    hashes = chain(node.cache, 4)
    fill(node.cache, hashes)
    held = node.hold_one(hashes[1])
    with Path(held.place.path).open("r+b") as file:
        file.seek(held.place.offset + 32)
        file.write(b"\xff" * 16)
    node.store.let_go([held])
    shards = node.store.hold(hashes)
    assert [held and held.address.index for held in shards] == [0, None, 2, 3]
    node.store.let_go([held for held in shards if held])
    assert node.store.missing(hashes) == [1]
    assert node.cache.counters()["cache_corrupt_blocks_total"] == 1
    assert node.cache.counters()["cache_pins"] == 0
    node.cache.check_integrity()


def cut(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("harm", [cut, Path.unlink])
@pytest.mark.parametrize("noticed", [True, False])
def test_shards_of_a_lost_arena_are_misses(
    host: Host, frozen: None, harm: Callable[[Path], None], noticed: bool
) -> None:
    far = open_node(host, "far", blocks=32)
    fill(far.cache, chain(far.cache, 16))
    near = open_node(host, "near", blocks=8)
    hashes = chain(near.cache, 8)
    assert far.give(near, hashes[:6]) == 6
    held = [shard for shard in near.store.hold(hashes[:3]) if shard is not None]
    late, given_up = near.store.reserve(address_of(hashes, 6)), near.store.reserve(address_of(hashes, 7))
    assert late is not None
    assert given_up is not None
    (arena,) = (path for path in host.arenas() if "_near_" in path.name)
    harm(arena)
    if noticed:
        near.cache._refresh_arenas()
    if harm is cut:
        assert near.store.hold(hashes) == [None] * 8
        assert not any(map(is_whole, held))
        assert bytes(held[0].payload) == bytes(FORMAT.payload_nbytes)
        assert near.store.resident(*EVERYWHERE) == []
        near.store.publish(late, far.hold_one(hashes[6]).header)
    else:
        assert all(map(is_whole, held)) is not noticed, "its bytes are there until it is let go of"
        receive(near, late, far)
    near.cache._refresh_arenas()
    near.store.abort(given_up)
    near.store.reject(held[0], Verdict.CORRUPT)
    near.store.let_go(held)
    assert near.store.missing(hashes) == list(range(8))
    assert near.cache.counters()["cache_pins"] == 0
    near.cache.check_integrity()
    assert far.give(near, hashes) == 8, "no slot waits for those who hold the old ones"
    assert read(near.cache, hashes) == 8


def test_an_arena_that_is_lost_has_no_slot_for_a_block(host: Host, frozen: None) -> None:
    node = open_node(host, "node", blocks=8)
    cut(host.arenas()[0])
    assert node.store.reserve(address_of(chain(node.cache, 1), 0)) is None
    node.cache.check_integrity()


def test_the_store_of_a_closed_cache_finds_nothing_and_takes_nothing(host: Host) -> None:
    near, far = open_node(host, "near", blocks=8), open_node(host, "far", blocks=8)
    hashes = chain(near.cache, 8)
    fill(near.cache, hashes[:4])
    fill(far.cache, hashes)
    held = [shard for shard in near.store.hold(hashes[:4]) if shard is not None]
    payload = held[1].payload
    incoming = [near.store.reserve(address_of(hashes, index)) for index in (4, 5)]
    assert incoming[0] is not None
    assert incoming[1] is not None
    incoming[0].payload[:] = memoryview(payload_of(hashes[4]))
    near.cache.close()
    assert not is_whole(held[0])
    assert bytes(payload) == payload_of(hashes[1]).tobytes(), "who had the bytes still may read them"
    near.store.publish(incoming[0], far.hold_one(hashes[4]).header)
    near.store.abort(incoming[1])
    near.store.reject(held[0], Verdict.CORRUPT)
    near.store.let_go(held)
    assert near.store.missing(hashes) == list(range(8))
    assert near.store.hold(hashes) == [None] * 8
    assert near.store.reserve(address_of(hashes, 0)) is None
    assert near.store.resident(*EVERYWHERE) == []
    assert near.store.drop(hashes) == 0
    del payload, held, incoming
    assert read(host.open(node="near", blocks=8), hashes) == 4


def test_an_arena_that_another_thread_just_closed_is_empty(host: Host) -> None:
    node = open_node(host, "node", blocks=8)
    hashes = chain(node.cache, 1)
    fill(node.cache, hashes)
    (arena,) = node.cache._tier.arenas
    header = node.hold_one(hashes[0]).header
    node.cache.close()
    arena.publish(0, header)
    assert not arena.whole()
    assert arena.header(0) == b""
    assert len(arena.headers()) == len(arena.payload(0)) == 0
