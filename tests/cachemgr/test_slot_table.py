"""The slot table alone: what happens under its lock, and what must not."""

from collections.abc import Callable

import numpy as np
import pytest

from cachemgr.contract import BlockHash
from cachemgr.counts import Counts
from cachemgr.shard import Verdict, address_of
from cachemgr.slot_table import SlotTable
from tests.cachemgr.host import Clock, Host, chain, fill

CHAIN = [BlockHash(bytes([number]) * 16) for number in range(1, 40)]
OTHER = [BlockHash(bytes([number]) * 16) for number in range(101, 140)]


class Bytes:
    """Stands for the arena: remembers what was erased, and tries what another thread could do just then."""

    def __init__(self, slots: int, *, empty: int | None = None) -> None:
        self.clock = Clock()
        self.erased: list[int] = []
        self.counts = Counts()
        self.table = SlotTable(slots, ttl_s=60.0, erase=self.erase, clock=self.clock, counts=self.counts)
        self.meanwhile: Callable[[], object] = bool
        self.table.add_empty(range(slots if empty is None else empty))

    def erase(self, slot: int) -> None:
        assert not self.table._state.lock.locked(), "bytes are touched while everybody waits"
        self.erased.append(slot)
        self.meanwhile()

    def write(self, hashes: list[BlockHash], index: int) -> int:
        slot = self.table.reserve(hashes, index)
        assert slot is not None
        self.table.publish(slot, address_of(hashes, index), hashes)
        return slot


def test_an_expired_block_is_erased_before_its_slot_is_free_and_without_the_lock() -> None:
    arena = Bytes(slots=4)
    written = [arena.write(CHAIN, index) for index in range(4)]
    arena.clock.now += 61
    taken: list[int | None] = []
    arena.meanwhile = lambda: taken.append(arena.table.reserve(OTHER, 0))
    arena.table.sweep()
    assert sorted(arena.erased) == sorted(written)
    assert taken == [None] * 4, "a slot was given away and then erased under its new writer"
    assert arena.table.reserve(OTHER, 0) is not None
    assert arena.counts.expired_blocks == 4
    arena.table.check_integrity()


def test_a_corrupt_block_is_erased_while_its_reader_keeps_the_slot() -> None:
    arena = Bytes(slots=1)
    slot = arena.write(CHAIN, 0)
    leased = arena.table.pin(CHAIN[:1])
    arena.meanwhile = lambda: arena.table.reserve(OTHER, 0)
    arena.table.reject(slot, CHAIN[0], Verdict.CORRUPT)
    assert arena.erased == [slot]
    assert arena.table.known(CHAIN[:1]) == 0
    arena.table.check_integrity()
    arena.table.unpin(leased)
    assert arena.table.reserve(OTHER, 0) == slot


def test_a_block_that_an_arena_brought_meanwhile_is_written_for_nothing_and_erased() -> None:
    arena = Bytes(slots=2, empty=1)
    slot = arena.table.reserve(CHAIN, 0)
    assert slot == 0
    arena.table.add_resident(CHAIN[:1], np.array([1], np.int32), np.zeros(1, np.uint32))
    arena.table.publish(slot, address_of(CHAIN, 0), CHAIN)
    assert arena.erased == [slot]
    assert arena.table.known(CHAIN[:1]) == 1
    assert arena.table.reserve(OTHER, 0) == slot


def test_an_arena_that_brings_known_blocks_gives_their_slots_after_erasing_them() -> None:
    arena = Bytes(slots=400, empty=0)
    names = [BlockHash(number.to_bytes(16, "little")) for number in range(200)]
    depths = np.zeros(200, np.uint32)
    arena.table.add_resident(names, np.arange(200, dtype=np.int32), depths)
    arena.table.add_resident(names, np.arange(200, 400, dtype=np.int32), depths)
    assert arena.erased == list(range(200, 400))
    assert arena.table.gauges()["cache_resident_blocks"] == arena.counts.reattached_blocks == 200
    arena.table.check_integrity()
    assert arena.table.reserve(OTHER, 0) in range(200, 400)


@pytest.mark.parametrize("expired", [False, True])
def test_the_slot_of_a_block_that_goes_is_the_one_that_is_reserved(expired: bool) -> None:
    arena = Bytes(slots=3)
    leaf = [arena.write(CHAIN, index) for index in range(3)][-1]
    arena.clock.now += 61 if expired else 1
    assert arena.table.reserve(*((CHAIN, 2) if expired else (OTHER, 0))) == leaf
    assert not arena.erased, "its writer does that"


def test_what_an_evicted_block_left_is_erased_before_the_new_one_is_written(host: Host) -> None:
    cache = host.open(blocks=1)
    fill(cache, chain(cache, 1))
    assert b"TCKV" in host.arenas()[0].read_bytes()
    assert cache.prepare(chain(cache, 1, seed=1), 0) is not None
    assert b"TCKV" not in host.arenas()[0].read_bytes()
