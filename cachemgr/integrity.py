"""Proves that index and eviction order agree; for tests and idle checks, O(n)."""

from collections.abc import Iterable

from cachemgr.contract import BlockHash
from cachemgr.eviction import Shares, SlotOrder
from cachemgr.index import BlockIndex


def check_slots(
    index: BlockIndex, order: SlotOrder, *, rejected: Iterable[int], slots: Iterable[int]
) -> list[tuple[BlockHash, int]]:
    """AssertionError if they contradict each other; every resident block and its slot.

    `rejected`: slots that failed a check and wait for their last reader. `slots`: all that were ever taken
    in, so that none is lost.
    """
    resident = list(index.resident())
    empty, reserved = index.free_slots(), set(index.reserved_slots())
    assert not empty & reserved
    assert len(reserved) == len(index.reserved_slots()), "two blocks are being written to one slot"
    for name, slot in resident:
        assert index.name(slot) == name
        assert slot not in empty | reserved
    for slot in range(index.capacity):
        named = index.name(slot) is not None
        assert not (slot in order and index.pins(slot)), f"slot {slot} is pinned and evictable"
        assert not named or slot in order or index.pins(slot), f"slot {slot} can never be evicted"
        assert slot not in order or slot not in (empty | reserved), f"slot {slot} is empty and evictable"
        assert not index.pins(slot) or slot not in (empty | reserved), f"slot {slot} is empty and pinned"
    assert index.pinned == sum(index.pins(slot) for slot in range(index.capacity))
    assert all(index.pins(slot) for slot in rejected)
    for slot in slots:
        used = slot in order or slot in empty or slot in reserved or index.pins(slot)
        assert used, f"slot {slot} is lost: neither empty nor written, evictable nor pinned"
    return resident


def check_shares(index: BlockIndex, shares: Shares) -> None:
    """AssertionError if what namespaces hold is not what is counted, or not theirs alone."""
    shares.check_integrity(set(range(index.capacity)) - index.free_slots())
