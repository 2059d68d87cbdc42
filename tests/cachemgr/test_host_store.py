"""The host tier as other nodes see it: what they hold stays, what they give is found, the rest is not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cachemgr import CacheSecrets
from cachemgr.shard import NO_PARENT, SEGMENT_BLOCKS, ShardCheck, Verdict, address_of, format_id
from tests.cachemgr.host import FORMAT, SECRETS, Host, chain, fill, payload_of, read, write
from tests.cachemgr.node import Node, is_whole, open_node


@pytest.fixture
def near(host: Host) -> Node:
    return open_node(host, "near", blocks=8)


@pytest.fixture
def far(host: Host) -> Node:
    return open_node(host, "far", blocks=64)


def crowd(node: Node, *, rounds: int = 4) -> None:
    """Write more than there is room for, several times."""
    for seed in range(100, 100 + rounds):
        fill(node.cache, chain(node.cache, 8, seed=seed))


def test_any_names_are_held_not_only_a_run(far: Node) -> None:
    hashes = chain(far.cache, 40)
    fill(far.cache, hashes)
    asked = [hashes[33], hashes[2], chain(far.cache, 1, seed=9)[0], hashes[33]]
    shards = far.store.hold(asked)
    assert [held and held.address for held in shards] == [
        address_of(hashes, 33), address_of(hashes, 2), None, address_of(hashes, 33)
    ]  # fmt: skip
    assert far.cache.counters()["cache_pins"] == 3
    held = [held for held in shards if held is not None]
    assert all(map(is_whole, held))
    assert all(shard.payload.readonly and shard.payload.nbytes == FORMAT.payload_nbytes for shard in held)
    far.store.let_go(held)
    far.store.let_go(held)
    assert far.cache.counters()["cache_pins"] == 0
    far.cache.check_integrity()


def test_more_than_a_slice_of_names_is_held_and_missed(host: Host) -> None:
    node = open_node(host, "big", blocks=300)
    hashes = chain(node.cache, 200)
    for index in range(0, 200, 2):
        write(node.cache, hashes, index)
    assert node.store.missing(hashes) == list(range(1, 200, 2))
    shards = node.store.hold(hashes)
    assert [held is not None for held in shards] == [index % 2 == 0 for index in range(200)]
    node.store.let_go([held for held in shards if held is not None])
    assert node.cache.counters()["cache_pins"] == 0


def test_the_place_of_a_held_shard_is_where_its_bytes_are_in_the_file(far: Node) -> None:
    hashes = chain(far.cache, 5)
    fill(far.cache, hashes)
    held = far.hold_one(hashes[3])
    path = Path(held.place.path)
    assert (path.stat().st_dev, path.stat().st_ino) == (held.place.device, held.place.inode)
    with path.open("rb") as file:
        file.seek(held.place.offset)
        assert file.read(128 + FORMAT.payload_nbytes) == held.header + bytes(held.payload)
    far.store.let_go([held])


def test_a_held_shard_stays_whatever_happens_and_goes_when_it_is_let_go(near: Node, host: Host) -> None:
    hashes = chain(near.cache, 3)
    fill(near.cache, hashes)
    held = near.hold_one(hashes[1])
    crowd(near)
    assert near.store.drop(hashes) == 1, "what comes after it went; it stays, and so did what it needs"
    host.clock.now += 1e6
    near.cache.acquire([], deadline=None)
    crowd(near)
    assert near.has(hashes[1])
    assert is_whole(held)
    near.store.let_go([held])
    crowd(near)
    assert not near.has(hashes[1])
    with pytest.raises(RuntimeError, match="let go"):
        held.payload  # noqa: B018
    near.cache.check_integrity()


def test_a_shard_held_and_leased_stays_until_the_last_of_both(near: Node) -> None:
    hashes = chain(near.cache, 2)
    fill(near.cache, hashes)
    held = near.hold_one(hashes[1])
    lease = near.cache.acquire(hashes, deadline=None)
    near.store.let_go([held])
    crowd(near)
    seen: list[int] = []
    assert near.cache.restore(lease, first=0, sink=lambda blocks, _: seen.extend(blocks)) == 2
    held = near.hold_one(hashes[1])
    lease.release()
    crowd(near)
    assert is_whole(held)
    assert near.store.missing(hashes) == []
    near.store.let_go([held])


def test_blocks_arrive_without_their_parents_and_the_least_recent_go_for_them(near: Node, far: Node) -> None:
    elsewhere = chain(far.cache, 40)
    fill(far.cache, elsewhere)
    old, used = chain(near.cache, 4, seed=1), chain(near.cache, 4, seed=2)
    fill(near.cache, old)
    fill(near.cache, used)
    assert far.give(near, elsewhere[32:36]) == 4
    assert near.cache.lookup(used) == 4
    assert near.store.missing(old) == [0, 1, 2, 3]
    assert near.store.missing(elsewhere[32:36]) == []
    assert near.cache.counters()["cache_evicted_blocks_total"] == 4
    assert near.cache.counters()["cache_received_blocks_total"] == 4
    fill(near.cache, chain(near.cache, 6, seed=3))
    assert near.store.missing(elsewhere[32:36]) == [2, 3], "they go like others, the deepest first"


def test_what_arrived_is_restored_with_the_header_it_was_sealed_with(near: Node, far: Node) -> None:
    hashes = chain(far.cache, 5)
    fill(far.cache, hashes)
    assert far.give(near, hashes) == 5
    before, after = far.hold_one(hashes[4]), near.hold_one(hashes[4])
    assert before.header == after.header
    assert bytes(before.payload) == bytes(after.payload)
    assert read(near.cache, hashes) == 5
    far.store.let_go([before])
    near.store.let_go([after])


def test_any_known_key_is_kept_and_an_unknown_one_is_not_taken(host: Host, near: Node) -> None:
    rotated = CacheSecrets(SECRETS.naming, {**SECRETS.tags, 7: bytes(range(64, 96))})
    newer = open_node(host, "newer", blocks=8, secrets=rotated)
    hashes = chain(near.cache, 2)
    fill(newer.cache, hashes)
    held = newer.hold_one(hashes[0])
    assert near.store.check(held.header, held.address) is Verdict.UNREADABLE
    both = open_node(host, "both", blocks=8, secrets=rotated)
    fill(near.cache, hashes)
    assert near.give(both, hashes) == 2
    assert read(both.cache, hashes) == 2
    newer.store.let_go([held])


def test_there_is_no_slot_for_what_is_here_or_being_written_by_anybody(near: Node, far: Node) -> None:
    hashes = chain(near.cache, 3)
    write(near.cache, hashes, 0)
    assert near.store.reserve(address_of(hashes, 0)) is None
    pending = near.cache.prepare(hashes, 1)
    assert pending is not None
    assert near.store.reserve(address_of(hashes, 1)) is None
    incoming = near.store.reserve(address_of(hashes, 2))
    assert incoming is not None
    assert near.store.reserve(address_of(hashes, 2)) is None
    assert near.cache.prepare(hashes, 2) is None
    assert near.store.missing(hashes) == []
    near.cache.abort(pending)
    near.store.abort(incoming)
    assert near.store.missing(hashes) == [1, 2]
    near.cache.check_integrity()


def test_nothing_that_is_held_and_no_ancestor_goes_for_a_block(near: Node, far: Node) -> None:
    hashes = chain(near.cache, 20)
    fill(near.cache, hashes[:8])
    held = [shard for shard in near.store.hold(hashes[:8]) if shard is not None]
    assert near.store.reserve(address_of(hashes, 19)) is None
    near.store.let_go(held[1:])
    near.store.drop(hashes[1:7])
    fill(far.cache, chain(far.cache, 5, seed=1))
    assert far.give(near, chain(far.cache, 5, seed=1)) == 5
    incoming = near.store.reserve(address_of(hashes, 10))
    assert incoming is not None, "a slot is left"
    assert near.store.reserve(address_of(hashes, 8)) is None, "its parent is the least recently used"
    near.store.abort(incoming)
    near.store.let_go(held)


def test_the_front_of_a_segment_does_not_go_for_its_end(near: Node, far: Node) -> None:
    hashes = chain(far.cache, 32)
    fill(far.cache, hashes)
    assert far.give(near, [hashes[SEGMENT_BLOCKS]]) == 1
    fill(near.cache, chain(near.cache, 7, seed=1))
    assert near.store.reserve(address_of(hashes, SEGMENT_BLOCKS + 5)) is None
    assert near.has(hashes[SEGMENT_BLOCKS])
    assert near.cache.counters()["cache_full_refusals_total"] == 1


def test_an_incoming_shard_is_found_when_it_is_published_and_not_before(near: Node, far: Node) -> None:
    hashes = chain(far.cache, 1)
    fill(far.cache, hashes)
    held = far.hold_one(hashes[0])
    incoming = near.store.reserve(held.address)
    assert incoming is not None
    assert incoming.payload.nbytes == near.store.payload_nbytes == FORMAT.payload_nbytes
    assert np.frombuffer(incoming.payload, np.uint8).ctypes.data % 128 == 0
    incoming.payload[:] = held.payload
    assert near.cache.lookup(hashes) == 0
    assert near.store.hold(hashes) == [None]
    near.store.publish(incoming, held.header)
    assert read(near.cache, hashes) == 1
    for again in (near.store.abort, lambda shard: near.store.publish(shard, held.header)):
        with pytest.raises(RuntimeError, match="before"):
            again(incoming)
    with pytest.raises(RuntimeError, match="not to be written"):
        incoming.payload  # noqa: B018
    far.store.let_go([held])


def test_a_header_of_another_block_is_our_bug_and_costs_no_slot(near: Node, far: Node) -> None:
    hashes = chain(far.cache, 2)
    fill(far.cache, hashes)
    held = far.hold_one(hashes[1])
    for header in (held.header, b"", bytes(128)):
        incoming = near.store.reserve(address_of(hashes, 0))
        assert incoming is not None
        with pytest.raises(ValueError, match="header"):
            near.store.publish(incoming, header)
    assert near.store.missing(hashes) == [0, 1]
    near.cache.check_integrity()
    far.store.let_go([held])


def test_a_check_refuses_other_names_other_places_and_other_bytes(near: Node, far: Node) -> None:
    hashes = chain(far.cache, 3)
    fill(far.cache, hashes)
    held = far.hold_one(hashes[1])
    assert near.store.check(held.header, address_of(hashes, 2)) is Verdict.CORRUPT
    assert near.store.check(held.header[:-1], held.address) is Verdict.CORRUPT
    assert near.store.check(bytes(128), held.address) is Verdict.CORRUPT
    for payload, passes in ((payload_of(hashes[1]), True), (payload_of(hashes[2]), False)):
        check = near.store.check(held.header, held.address)
        assert isinstance(check, ShardCheck)
        check.update(payload.data)
        assert check.passed() is passes
    far.store.let_go([held])


@pytest.mark.parametrize("verdict", [Verdict.CORRUPT, Verdict.UNREADABLE])
def test_a_rejected_shard_is_not_found_and_its_slot_comes_back(host: Host, verdict: Verdict) -> None:
    node = open_node(host, "small", blocks=1)
    hashes, other = chain(node.cache, 1), address_of(chain(node.cache, 1, seed=1), 0)
    fill(node.cache, hashes)
    first, second = node.hold_one(hashes[0]), node.hold_one(hashes[0])
    node.store.reject(first, verdict)
    node.store.reject(second, verdict)
    assert node.store.missing(hashes) == [0]
    node.store.let_go([first])
    assert node.store.reserve(other) is None, "somebody still reads the slot"
    assert is_whole(second)
    node.store.let_go([second])
    node.cache.check_integrity()
    incoming = node.store.reserve(other)
    assert incoming is not None
    node.store.abort(incoming)
    counts = node.cache.counters()
    assert counts[f"cache_{verdict.value}_blocks_total"] == 1
    assert counts["cache_pins"] == 0


def test_a_shard_that_was_let_go_cannot_be_rejected_any_more(near: Node) -> None:
    hashes = chain(near.cache, 1)
    fill(near.cache, hashes)
    held, other = near.hold_one(hashes[0]), near.hold_one(hashes[0])
    near.store.let_go([held])
    near.store.reject(held, Verdict.CORRUPT)
    assert near.has(hashes[0])
    near.store.let_go([other])
    near.store.reject(held, Verdict.CORRUPT)
    assert read(near.cache, hashes) == 1
    near.cache.check_integrity()


def test_dropped_blocks_are_gone_and_can_come_again(near: Node, far: Node) -> None:
    hashes = chain(far.cache, 8)
    fill(far.cache, hashes)
    assert far.give(near, hashes) == 8
    assert near.store.drop([*hashes[4:], hashes[4], chain(near.cache, 1, seed=1)[0]]) == 4
    assert near.store.missing(hashes) == [4, 5, 6, 7]
    assert near.cache.counters()["cache_dropped_blocks_total"] == 4
    assert far.give(near, hashes) == 8
    assert read(near.cache, hashes) == 8
    assert near.cache.counters()["cache_evicted_blocks_total"] == 0
    near.cache.check_integrity()


def test_dropped_blocks_do_not_come_back_with_the_next_process(host: Host) -> None:
    node = open_node(host, "near", blocks=8)
    hashes = chain(node.cache, 8)
    fill(node.cache, hashes)
    assert node.store.drop(hashes[5:]) == 3
    node.cache.close()
    assert host.open(node="near", blocks=8).lookup(hashes) == 5


def test_foreign_shards_are_our_bug(near: Node) -> None:
    for misuse in (
        lambda: near.store.let_go([object()]),  # type: ignore[list-item]
        lambda: near.store.abort(object()),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            misuse()


def test_formats_are_equal_only_where_blocks_can_be_exchanged(near: Node, far: Node) -> None:
    assert near.store.format_id == far.store.format_id == format_id(FORMAT)
    changes: list[dict[str, object]] = [
        {"kv_identity": b"identity of othe"}, {"dtype": "float16"}, {"layers": 1, "kv_heads": 2},
        {"head_dim": 8, "block_tokens": 2},
    ]  # fmt: skip
    others = [replace(FORMAT, **change) for change in changes]  # type: ignore[arg-type]
    assert len({format_id(each) for each in [FORMAT, *others]}) == 5
    assert len(format_id(FORMAT)) == 16


def test_the_first_block_has_no_parent(far: Node) -> None:
    hashes = chain(far.cache, 1)
    fill(far.cache, hashes)
    held = far.hold_one(hashes[0])
    assert held.address.parent == NO_PARENT
    far.store.let_go([held])
