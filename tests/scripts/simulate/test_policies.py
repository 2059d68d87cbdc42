"""Each textbook policy against results made by hand and against a naive telling of the same rule."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.simulate.contract import Policy
from scripts.simulate.policies.fifo import Fifo
from scripts.simulate.policies.lfu import Lfu
from scripts.simulate.policies.lru import Lru
from scripts.simulate.policies.lru2 import Lru2
from scripts.simulate.policies.s3_fifo import S3Fifo
from scripts.simulate.policies.sieve import Sieve
from scripts.simulate.policies.w_tinylfu import WTinyLfu
from scripts.simulate.prefix_cache import PrefixCache
from tests.scripts.simulate.traces import there, touched

TEXTBOOK = (Fifo, Lru, Lfu, Lru2, Sieve, S3Fifo, WTinyLfu)
ALL = range(40)
streams = st.lists(st.integers(0, 12), max_size=150)


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (Fifo, {3, 4, 5}),  # 1 came first, then 2
        (Lru, {1, 4, 5}),  # 2 and 3 were not used since
        (Lfu, {1, 2, 5}),  # 3 was used once, then 4
        (Lru2, {1, 2, 5}),  # 3 and 4 were used once
        (Sieve, {2, 4, 5}),  # the hand spares 1 and 2, takes 3, the newest, and begins anew: 1
    ],
)
def test_by_hand(policy: Callable[[int], Policy], left: set[int]) -> None:
    made = policy(3)
    touched(made, [1, 2, 3, 2, 1, 4, 5] if policy is not Lru else [1, 2, 3, 1, 4, 5])
    assert there(made, ALL) == left


def test_lru2_goes_by_the_second_to_last_use() -> None:
    made = Lru2(2)
    touched(made, [1, 1, 2, 2, 1])  # 1 was used last, but 2's use before the last is younger
    touched(made, [3])
    assert there(made, ALL) == {2, 3}


def test_lru2_remembers_what_is_gone() -> None:
    made = Lru2(2)
    touched(made, [1, 2, 2, 3, 1])  # 1 went for 3, 3 went for 1, which was used twice now
    touched(made, [4])
    assert there(made, ALL) == {2, 4}, "1's use before the last is older than 2's"


def test_lfu_of_equals_takes_the_least_recent() -> None:
    made = Lfu(2)
    touched(made, [1, 2, 2, 1, 3])
    assert there(made, ALL) == {1, 3}


def test_s3_fifo_by_hand() -> None:
    made = S3Fifo(10)  # a small queue of one
    touched(made, [*range(1, 11), 1, 11])
    assert there(made, ALL) == {1, *range(3, 12)}, "1 was used and goes to the main queue, 2 goes"
    touched(made, [2])
    assert there(made, ALL) == {1, 2, *range(4, 12)}, "2 is known: it pushes 3 out"
    touched(made, range(12, 32))
    assert {1, 2} <= there(made, ALL), "both are in the main queue, where new blocks do not come"


def test_w_tinylfu_by_hand() -> None:
    made = WTinyLfu(2)  # a window of one, a main part of one
    touched(made, [1, 2, 3])
    assert there(made, ALL) == {1, 3}, "2 was not used more often than 1"
    touched(made, [2, 3])
    assert there(made, ALL) == {2, 3}, "2 was used twice, which the window's loss of it did not forget"


def naive_fifo(capacity: int, blocks: Sequence[int]) -> list[bool]:
    queue: list[int] = []
    found = []
    for block in blocks:
        found.append(block in queue)
        queue = queue if found[-1] else [*queue, block][-capacity:]
    return found


def naive_lru(capacity: int, blocks: Sequence[int]) -> list[bool]:
    recent: list[int] = []
    found = []
    for block in blocks:
        found.append(block in recent)
        recent = [*(other for other in recent if other != block), block][-capacity:]
    return found


def by_worth(
    worth: Callable[[list[int]], Any], *, forgets: bool
) -> Callable[[int, Sequence[int]], list[bool]]:
    """What goes is the block of least worth, judged by the times of its uses."""

    def naive(capacity: int, blocks: Sequence[int]) -> list[bool]:
        here: set[int] = set()
        uses: dict[int, list[int]] = {}
        found = []
        for now, block in enumerate(blocks):
            found.append(block in here)
            if not found[-1] and len(here) == capacity:
                victim = min(here, key=lambda other: worth(uses[other]))
                here.remove(victim)
                if forgets:
                    del uses[victim]
            here.add(block)
            uses.setdefault(block, []).append(now)
        return found

    return naive


def naive_sieve(capacity: int, blocks: Sequence[int]) -> list[bool]:
    queue: list[int] = []  # oldest first
    used: set[int] = set()
    hand = 0
    found = []
    for block in blocks:
        found.append(block in queue)
        if found[-1]:
            used.add(block)
            continue
        if len(queue) == capacity:
            hand %= len(queue)
            while queue[hand] in used:
                used.remove(queue[hand])
                hand = (hand + 1) % len(queue)
            was_newest = hand == len(queue) - 1
            del queue[hand]
            hand = 0 if was_newest else hand
        queue.append(block)
    return found


def naive_s3_fifo(capacity: int, blocks: Sequence[int]) -> list[bool]:
    """With the queues as one list of (block, uses) each, newest first, as the paper draws them."""
    small: list[list[int]] = []
    main: list[list[int]] = []
    ghosts: list[int] = []
    room = max(1, capacity // 10)

    def shrink_main() -> None:
        while main:
            block, uses = main.pop()
            if uses == 0:
                return
            main.insert(0, [block, uses - 1])

    def shrink_small() -> None:
        while small:
            block, uses = small.pop()
            if uses == 0:
                ghosts.insert(0, block)
                del ghosts[capacity - room :]
                return
            main.insert(0, [block, 0])
            if len(main) > capacity - room:
                shrink_main()

    found = []
    for block in blocks:
        entry = next((entry for entry in small + main if entry[0] == block), None)
        found.append(entry is not None)
        if entry is not None:
            entry[1] = min(entry[1] + 1, 3)
            continue
        queue = main if block in ghosts else small
        ghosts = [other for other in ghosts if other != block]
        while len(small) + len(main) >= capacity:
            if len(small) >= room or not main:
                shrink_small()
            else:
                shrink_main()
        queue.insert(0, [block, 0])
    return found


def naive_w_tinylfu(capacity: int, blocks: Sequence[int]) -> list[bool]:
    """Lists with the least recent first; counts of everything."""
    window: list[int] = []
    probation: list[int] = []
    protected: list[int] = []
    counts: dict[int, int] = {}
    room = max(1, capacity // 100)
    main_room = capacity - room
    counted = 0
    found = []
    for block in blocks:
        counts[block] = min(counts.get(block, 0) + 1, 15)
        counted += 1
        if counted >= 10 * capacity:
            counted //= 2
            counts = {other: count // 2 for other, count in counts.items()}
        found.append(block in window + probation + protected)
        for part in (window, protected):
            if block in part:
                part.remove(block)
                part.append(block)
        if block in probation:
            probation.remove(block)
            protected.append(block)
            if len(protected) > main_room * 8 // 10:
                probation.append(protected.pop(0))
        if found[-1]:
            continue
        window.append(block)
        if len(window) <= room:
            continue
        candidate = window.pop(0)
        victims = probation or protected
        if len(probation) + len(protected) < main_room:
            probation.append(candidate)
        elif victims and counts[candidate] > counts[victims[0]]:
            victims.pop(0)
            probation.append(candidate)
    return found


@pytest.mark.parametrize(
    ("policy", "naive"),
    [
        (Fifo, naive_fifo),
        (Lru, naive_lru),
        (Lfu, by_worth(lambda uses: (len(uses), uses[-1]), forgets=True)),
        (Lru2, by_worth(lambda uses: (uses[-2] if len(uses) > 1 else -1, uses[-1]), forgets=False)),
        (Sieve, naive_sieve),
        (S3Fifo, naive_s3_fifo),
        (WTinyLfu, naive_w_tinylfu),
    ],
)
@given(capacity=st.integers(1, 12), blocks=streams)
def test_as_told_naively(
    policy: Callable[[int], Policy],
    naive: Callable[[int, Sequence[int]], list[bool]],
    capacity: int,
    blocks: list[int],
) -> None:
    assert touched(policy(capacity), blocks) == naive(capacity, blocks)


@pytest.mark.parametrize("policy", TEXTBOOK)
@given(capacity=st.integers(1, 12), blocks=streams)
def test_never_more_than_the_capacity(
    policy: Callable[[int], Policy], capacity: int, blocks: list[int]
) -> None:
    made = policy(capacity)
    for block in blocks:
        made.touch(block)
        assert len(there(made, ALL)) <= capacity


@pytest.mark.parametrize("policy", [Lru2, WTinyLfu])
def test_history_of_long_runs_is_thinned(policy: Callable[[int], Policy]) -> None:
    """Nothing grows with the number of uses."""
    made = policy(4)
    for _ in range(3000):
        for block in range(4):
            made.touch(block)
    kept = [value for value in vars(made).values() if hasattr(value, "__len__")]
    assert max(map(len, kept)) < 2000
    assert there(made, ALL) <= set(range(4))


def test_a_prefix_loses_its_tail_first() -> None:
    cache = PrefixCache(Lru(4))
    assert cache.request([1, 2, 3]) == 0
    assert cache.request([9, 8]) == 0  # two of room, so one block must go: 3
    assert cache.request([1, 2, 3]) == 2


def test_hits_end_at_the_first_gap() -> None:
    cache = PrefixCache(Fifo(2))
    assert cache.request([1, 2, 3]) == 0  # 3, then 2, then 1: 3 went
    assert cache.request([3, 2]) == 0  # 3 comes for 2
    assert cache.request([1, 2, 3]) == 1
