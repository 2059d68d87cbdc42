"""The order of chains before anything is learned, and the lists that hold it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.contract import BlockHash
from cachemgr.eviction import AdaptivePolicy
from cachemgr.eviction.class_lists import ClassLists


def enter(policy: AdaptivePolicy, slots: list[int], *, parent: int | None = None, depth: int = 0) -> None:
    """A chain, or a branch of one, from the front."""
    for slot in slots:
        policy.enter(slot, BlockHash(slot.to_bytes(16, "little")), depth=depth, parent=parent, cheap=False)
        parent, depth = slot, depth + 1


def drain(policy: AdaptivePolicy) -> list[int]:
    """Evict everything; the order it went in."""
    gone = []
    while (slot := policy.victim()) is not None:
        policy.evict(slot, BlockHash(slot.to_bytes(16, "little")))
        gone.append(slot)
    return gone


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "prepend", "link", "remove"]), st.integers(0, 9), st.integers(0, 1)
        )
    )
)
def test_lists_equal_plain_lists(steps: list[tuple[str, int, int]]) -> None:
    lists = ClassLists(10, 2)
    models: tuple[list[int], list[int]] = ([], [])
    for step, slot, which in steps:
        for model in models:
            if slot in model:
                lists.remove(slot)
                model.remove(slot)
        model = models[which]
        if step == "append":
            lists.append(slot, which)
            model.append(slot)
        elif step == "prepend":
            lists.prepend(slot, which)
            model.insert(0, slot)
        elif step == "link" and model:
            lists.link(slot, newer=model[-1])
            model.insert(len(model) - 1, slot)
        assert [lists.least_recent(0), lists.least_recent(1)] == [m[0] if m else None for m in models]
        assert [slot for slot in range(10) if slot in lists] == sorted(models[0] + models[1])


@given(st.lists(st.integers(0, 99), unique=True, min_size=1), st.lists(st.integers(0, 99), unique=True))
def test_many_at_once_equals_one_by_one(first: list[int], second: list[int]) -> None:
    lists = ClassLists(100, 1)
    second = [slot for slot in second if slot not in first]
    for slots in (first, second):
        if slots:
            lists.append_many(np.array(slots, np.int32), 0)
    gone = []
    while (slot := lists.least_recent(0)) is not None:
        lists.remove(slot)
        gone.append(slot)
    assert gone == first + second


def test_a_committed_chain_goes_leaf_first() -> None:
    policy = AdaptivePolicy(100)
    enter(policy, list(range(40)))
    assert drain(policy) == list(range(39, -1, -1))


def test_between_chains_the_least_recently_used_goes_first() -> None:
    policy = AdaptivePolicy(100)
    for chain in range(3):
        enter(policy, [10 * chain, 10 * chain + 1, 10 * chain + 2])
    for slot in (0, 1, 2):  # chain 0 is read: pinned, then released deepest first
        policy.pin(slot)
    for slot in (2, 1, 0):
        policy.release(slot)
    assert drain(policy) == [12, 11, 10, 22, 21, 20, 2, 1, 0]


def test_a_shared_front_outlives_its_branches() -> None:
    policy = AdaptivePolicy(100)
    enter(policy, [0])
    for branch in (10, 20):
        enter(policy, [branch, branch + 1], parent=0, depth=1)
    gone = drain(policy)
    assert gone[-1] == 0
    assert gone.index(11) < gone.index(10)
    assert gone.index(21) < gone.index(20)
