"""Blocks by name, without bytes: what happens under the lock, and what must not."""

import numpy as np
import pytest

from cachemgr.shard import Verdict, address_of
from tests.cachemgr.test_slot_table import CHAIN, OTHER, Bytes


def arrive(arena: Bytes, index: int) -> int:
    slot = arena.table.single.reserve(address_of(CHAIN, index))
    assert slot is not None
    arena.table.single.publish(slot, address_of(CHAIN, index))
    return slot


def test_a_dropped_block_is_erased_before_its_slot_is_free_and_without_the_lock() -> None:
    arena = Bytes(slots=4)
    written = [arrive(arena, index) for index in (30, 2, 17, 5)]
    taken: list[int | None] = []
    arena.meanwhile = lambda: taken.append(arena.table.single.reserve(address_of(OTHER, 0)))
    pinned = arena.table.single.pin([CHAIN[2]])
    assert arena.table.single.drop(CHAIN) == 3
    assert sorted(arena.erased) == sorted(set(written) - {written[1]})
    assert taken[0] is None, "a slot was given away and then erased under its new writer"
    assert pinned == [written[1]]
    arena.table.check_integrity(range(4))


def test_a_block_that_an_arena_brought_meanwhile_came_for_nothing_and_is_erased() -> None:
    arena = Bytes(slots=2, empty=1)
    slot = arena.table.single.reserve(address_of(CHAIN, 7))
    assert slot == 0
    arena.table.add_resident([CHAIN[7]], np.array([1], np.int32), np.array([7], np.uint32))
    arena.table.single.publish(slot, address_of(CHAIN, 7))
    assert arena.erased == [slot]
    assert arena.counts.received_blocks == 0
    assert arena.table.single.pin([CHAIN[7]]) == [1]
    assert arena.table.single.reserve(address_of(OTHER, 0)) == slot


def test_an_expired_block_gives_way_to_its_successor_and_is_missing() -> None:
    arena = Bytes(slots=1)
    slot = arrive(arena, 3)
    arena.clock.now += 61
    assert arena.table.single.missing(CHAIN[2:5]) == [0, 1, 2]
    assert arena.table.single.pin(CHAIN[2:5]) == [None] * 3
    assert arena.table.single.found_at([CHAIN[3]], [slot]) == []
    assert arrive(arena, 3) == slot
    assert arena.counts.expired_blocks == 1
    assert arena.table.single.found_at([CHAIN[3], CHAIN[3]], [slot + 1, slot]) == [1]


def test_what_is_pinned_does_not_expire() -> None:
    arena = Bytes(slots=2)
    slot = arrive(arena, 3)
    arena.table.single.pin([CHAIN[3]])
    arena.clock.now += 1000
    arena.table.sweep()
    assert arena.table.single.pin([CHAIN[3]]) == [slot]
    assert arena.table.single.reserve(address_of(CHAIN, 3)) is None
    arena.table.unpin([slot, slot])
    assert arena.table.single.missing([CHAIN[3]]) == [], "it was used just now"


def test_uses_count_what_came_was_found_and_is_remembered() -> None:
    arena = Bytes(slots=4)
    written = arrive(arena, 0)
    arena.table.unpin([slot for slot in arena.table.single.pin([CHAIN[0]]) if slot is not None])
    assert arena.table.single.uses([CHAIN[0], OTHER[0], CHAIN[3]]) == [2, 0, 0]
    arena.table._state.evict(written)
    assert arena.table.single.uses([CHAIN[0]]) == [2], "it went, and is remembered"
    arrive(arena, 0)
    assert arena.table.single.uses([CHAIN[0]]) == [3]


def test_a_child_that_arrives_goes_before_its_parent() -> None:
    """Its parent is the least recently used of all."""
    arena = Bytes(slots=3)
    arrive(arena, 5)
    arrive(arena, 20)
    child = arrive(arena, 6)
    assert arena.table.single.reserve(address_of(OTHER, 9)) == child


def test_a_slot_rejected_by_one_of_two_readers_is_free_after_the_other() -> None:
    arena = Bytes(slots=1)
    slot = arrive(arena, 3)
    arena.table.single.pin([CHAIN[3]])
    arena.table.single.pin([CHAIN[3]])
    arena.table.reject(slot, CHAIN[3], Verdict.CORRUPT)
    arena.table.unpin([slot])
    assert arena.table.single.reserve(address_of(OTHER, 0)) is None
    arena.table.unpin([slot])
    assert arena.table.single.reserve(address_of(OTHER, 0)) == slot


def test_a_slot_that_nobody_reads_cannot_be_rejected() -> None:
    arena = Bytes(slots=1)
    slot = arrive(arena, 3)
    arena.table.reject(slot, CHAIN[3], Verdict.CORRUPT)
    assert arena.table.single.missing([CHAIN[3]]) == []
    arena.table.check_integrity(range(1))


def test_a_lost_slot_is_noticed() -> None:
    arena = Bytes(slots=2)
    arrive(arena, 3)
    arena.table._state.index.forget(0)
    arena.table._state.order.pin(0)
    with pytest.raises(AssertionError, match="lost"):
        arena.table.check_integrity(range(2))
