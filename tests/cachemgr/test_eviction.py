"""Eviction order: a list model, leaf first, and constant cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.eviction import LeafFirstLru

POLICIES = [pytest.param(LeafFirstLru, id="leaf-first-lru")]


def drain(policy: LeafFirstLru) -> list[int]:
    """Evict everything; the order it went in."""
    gone = []
    while (slot := policy.victim()) is not None:
        policy.withdraw(slot)
        gone.append(slot)
    return gone


@given(st.lists(st.tuples(st.sampled_from(["use", "first", "child", "withdraw"]), st.integers(0, 9))))
def test_equals_a_plain_list(steps: list[tuple[str, int]]) -> None:
    policy, model = LeafFirstLru(10), []
    for step, slot in steps:
        if slot in model:
            policy.withdraw(slot)
            model.remove(slot)
        if step == "use":
            policy.offer(slot)
            model.append(slot)
        elif step == "first":
            policy.offer_first(slot)
            model.insert(0, slot)
        elif step == "child":
            parent = (slot + 1) % 10
            policy.offer(slot, parent=parent)
            model.insert(model.index(parent) if parent in model else len(model), slot)
        assert policy.victim() == (model[0] if model else None)
        assert [slot for slot in range(10) if slot in policy] == sorted(model)
    assert drain(policy) == model


@pytest.mark.parametrize("policy_type", POLICIES)
def test_a_committed_chain_goes_leaf_first(policy_type: type[LeafFirstLru]) -> None:
    policy = policy_type(100)
    for slot in range(40):
        policy.offer(slot, parent=slot - 1 if slot else None)
    assert drain(policy) == list(range(39, -1, -1))


@pytest.mark.parametrize("policy_type", POLICIES)
def test_between_chains_the_least_recently_used_goes_first(policy_type: type[LeafFirstLru]) -> None:
    policy = policy_type(100)
    for chain in range(3):
        for depth in range(3):
            policy.offer(10 * chain + depth, parent=10 * chain + depth - 1 if depth else None)
    for depth in (2, 1, 0):  # chain 0 is read: pinned, then released deepest first
        policy.withdraw(depth)
    for depth in (2, 1, 0):
        policy.offer(depth)
    assert drain(policy) == [12, 11, 10, 22, 21, 20, 2, 1, 0]


@pytest.mark.parametrize("policy_type", POLICIES)
def test_a_shared_front_outlives_its_branches(policy_type: type[LeafFirstLru]) -> None:
    policy = policy_type(100)
    policy.offer(0)
    for branch in (10, 20):
        policy.offer(branch, parent=0)
        policy.offer(branch + 1, parent=branch)
    gone = drain(policy)
    assert gone[-1] == 0
    assert gone.index(11) < gone.index(10)
    assert gone.index(21) < gone.index(20)


@given(st.lists(st.integers(0, 99), unique=True), st.lists(st.integers(0, 99), unique=True))
def test_many_at_once_equals_one_by_one(first: list[int], second: list[int]) -> None:
    at_once, one_by_one = LeafFirstLru(100), LeafFirstLru(100)
    second = [slot for slot in second if slot not in first]
    for slots in (first, second):
        at_once.offer_many(np.array(slots, np.int32))
        for slot in slots:
            one_by_one.offer(slot)
    assert drain(at_once) == drain(one_by_one) == first + second
