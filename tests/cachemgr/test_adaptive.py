"""The product's policy: leaf first, bounded, sparing what was seen, and near the better of LRU and LFU."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.contract import BlockHash
from cachemgr.eviction import AdaptivePolicy, PolicyCache

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/conversation_trace.jsonl"
Requests = list[list[BlockHash]]


def name(*what: object) -> BlockHash:
    return BlockHash(blake2b(repr(what).encode(), digest_size=16).digest())


def chain(length: int, *what: object) -> list[BlockHash]:
    return [name(depth, *what) for depth in range(length)]


def enter(policy: AdaptivePolicy, slots: Sequence[int], *what: object, cheap: bool = False) -> None:
    for depth, slot in enumerate(slots):
        parent = slots[depth - 1] if depth else None
        policy.enter(slot, name(depth, *what), depth=depth, parent=parent, cheap=cheap)


def use(policy: AdaptivePolicy, slots: Sequence[int]) -> None:
    for slot in slots:
        policy.pin(slot)
    for slot in reversed(slots):
        policy.release(slot)


def drain(policy: AdaptivePolicy) -> list[int]:
    gone = []
    while (slot := policy.victim()) is not None:
        policy.evict(slot, name("slot", slot))
        gone.append(slot)
    return gone


STEPS = st.lists(
    st.tuples(st.sampled_from(["grow", "use", "pin", "release", "evict", "forget"]), st.integers(0, 11)),
    max_size=80,
)


@given(STEPS)
def test_nothing_goes_before_what_comes_after_it(steps: list[tuple[str, int]]) -> None:
    policy = AdaptivePolicy(64)
    parents: dict[int, int | None] = {}
    pinned: set[int] = set()
    free = list(range(64))

    def depth_of(slot: int) -> int:
        parent = parents.get(slot)
        return 0 if parent is None else 1 + depth_of(parent)

    for step, pick in steps:
        here = sorted(parents)
        slot = here[pick % len(here)] if here else None
        if step == "grow" and free:
            new, parent = free.pop(), slot if pick % 3 else None
            depth = 0 if parent is None else 1 + depth_of(parent)
            policy.enter(new, name(new, pick), depth=depth, parent=parent)
            parents[new] = parent
        elif step == "use" and slot is not None and slot not in pinned:
            use(policy, [slot])
        elif step == "pin" and slot is not None and slot not in pinned:
            policy.pin(slot)
            pinned.add(slot)
        elif step == "release" and pinned:
            released = min(pinned)
            policy.release(released)
            pinned.remove(released)
        elif step == "forget" and slot is not None:
            policy.forget(slot)
            pinned.discard(slot)
            del parents[slot]
            parents = {child: None if parent == slot else parent for child, parent in parents.items()}
            free.append(slot)
        elif step == "evict" and (going := policy.victim()) is not None:
            assert policy.victim() == going, "to look changes nothing"
            assert going in parents
            assert going not in pinned
            assert going not in parents.values()
            policy.evict(going, name(going))
            del parents[going]
            free.append(going)
        assert {slot for slot in range(64) if slot in policy} == parents.keys() - pinned


@given(st.lists(st.integers(0, 99), unique=True, min_size=1))
def test_what_was_found_written_goes_in_the_order_given(slots: list[int]) -> None:
    policy = AdaptivePolicy(100)
    policy.enter_many(
        np.array(slots, np.int32), [name(slot) for slot in slots], np.zeros(len(slots), np.uint32)
    )
    assert drain(policy) == slots


def test_copies_that_are_elsewhere_too_go_before_what_was_used_as_long_ago() -> None:
    policy = AdaptivePolicy(100)
    for pair in range(5):
        enter(policy, [2 * pair], pair)
        enter(policy, [2 * pair + 1], pair, "copy", cheap=True)
    assert [slot % 2 for slot in drain(policy)][:3] == [1, 1, 1]


def test_what_nobody_here_can_read_goes_first() -> None:
    policy = AdaptivePolicy(10)
    enter(policy, [0, 1], "chain")
    policy.enter_first(5)
    assert drain(policy) == [5, 1, 0]


def test_the_branch_that_a_conversation_left_goes_before_all_others() -> None:
    policy = AdaptivePolicy(20)
    enter(policy, [0, 1, 2, 3], "left")
    enter(policy, [10, 11], "other")
    use(policy, [0, 1])
    policy.enter(4, name("instead"), depth=2, parent=1)
    use(policy, [10, 11])
    assert drain(policy)[:2] == [3, 2]


def test_uses_are_counted_here_and_remembered_for_what_went() -> None:
    policy = AdaptivePolicy(40)
    enter(policy, [0], "a")
    use(policy, [0])
    use(policy, [0])
    assert policy.seen(0) == 3
    assert policy.uses(name(0, "a")) == 0, "it is here: ask for its slot"
    policy.evict(0, name(0, "a"))
    assert policy.uses(name(0, "a")) == 3
    assert policy.uses(name(0, "b")) == 0
    enter(policy, [0], "a")
    assert policy.seen(0) == 4


def test_what_was_found_written_is_remembered_like_others() -> None:
    policy = AdaptivePolicy(100)
    names = chain(3, "found")[::-1]
    policy.enter_many(np.arange(3, dtype=np.int32), names, np.array([2, 1, 0], np.uint32))
    assert [policy.seen(slot) for slot in range(3)] == [1, 1, 1]
    for slot in (0, 1, 2):
        policy.evict(slot, names[slot])
    assert policy.uses(names[2]) == 1


def test_when_full_of_what_comes_back_what_never_does_is_declined() -> None:
    cache = PolicyCache(120)
    for turn in range(400):
        cache.request(chain(20, turn % 5))
        cache.request(chain(20, "once", turn))
    before = sum(cache.request(chain(20, which)) for which in range(5))
    assert before == 100, "all five are here whatever came between"


def test_a_chain_that_comes_back_was_seen_as_a_whole() -> None:
    policy = AdaptivePolicy(100)
    slots = list(range(40))
    enter(policy, slots, "chain")
    for slot in reversed(slots):
        policy.evict(slot, name(slot, "chain"))
    enter(policy, slots, "chain")
    assert {policy.seen(slot) for slot in slots} == {2}


class Watched(AdaptivePolicy):
    """Compares the place that a block gets with the one that it was said to get."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.entered = 0

    def enter(
        self, slot: int, name: BlockHash, *, depth: int, parent: int | None, cheap: bool = False
    ) -> None:
        said = self._admission._place_of(name, parent)
        super().enter(slot, name, depth=depth, parent=parent, cheap=cheap)
        assert self._places[slot] == said
        self.entered += 1


PROMPTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(0, 30)), min_size=1)
"""Lengths, which front, and where it is left."""


@given(PROMPTS)
def test_a_block_gets_the_place_in_its_group_for_which_it_was_admitted(
    prompts: list[tuple[int, int, int]],
) -> None:
    cache = PolicyCache(50)
    policy = cache.policy = Watched(50)
    for length, front, fork in prompts:
        shared, own = chain(min(length, fork), front), chain(length, front, fork)
        cache.request(shared + own[len(shared) :])
    assert policy.entered > 0


def test_a_group_begins_with_what_is_new_after_what_was_known() -> None:
    """One block of a group is remembered: a conversation behind a long front that all share must have one."""
    policy = AdaptivePolicy(100)
    front = list(range(20))
    enter(policy, front, "front")
    use(policy, front)
    policy.enter(50, name("own"), depth=20, parent=19)
    policy.enter(51, name("own", 2), depth=21, parent=50)
    policy.evict(51, name("own", 2))
    policy.evict(50, name("own"))
    assert (policy.uses(name("own")), policy.uses(name("own", 2))) == (1, 0)
    policy.enter(60, name("another"), depth=20, parent=19)
    assert policy.seen(60) == 1, "it is not the one that went"
    policy.enter(61, name("own"), depth=20, parent=19)
    policy.enter(62, name("own", 2), depth=21, parent=61)
    assert (policy.seen(61), policy.seen(62)) == (2, 2)


def test_history_is_bounded_by_twice_the_capacity() -> None:
    cache = PolicyCache(64)
    for turn in range(2000):
        cache.request(chain(3, turn))
        assert len(cache) <= 64
        assert cache.policy.gauges()["cache_ghosts"] <= 2 * 64
    assert cache.policy.gauges()["cache_ghosts"] > 16


def test_policies_of_no_capacity_hold_nothing() -> None:
    policy = AdaptivePolicy(0)
    assert policy.victim() is None
    assert policy.uses(name("a")) == 0


def hits(requests: Iterable[list[BlockHash]], capacity: int) -> int:
    cache = PolicyCache(capacity)
    return sum(map(cache.request, requests))


def lru_hits(requests: Requests, capacity: int) -> int:
    order: OrderedDict[BlockHash, None] = OrderedDict()
    found = 0
    for names in requests:
        run = next((depth for depth, one in enumerate(names) if one not in order), len(names))
        found += run
        for one in reversed(names):
            order[one] = None
            order.move_to_end(one)
        while len(order) > capacity:
            order.popitem(last=False)
    return found


def best_fixed_hits(requests: Requests, capacity: int) -> int:
    """What a cache gets that holds from the beginning the blocks that are asked for most: LFU at its best."""
    asked: dict[BlockHash, int] = {}
    for names in requests:
        for one in names:
            asked[one] = asked.get(one, 0) + 1
    return sum(sorted(asked.values(), reverse=True)[:capacity])


def conversations(seed: int, count: int) -> Requests:
    """Many at a time, each growing by two blocks a turn, eight turns each: the recent is what comes back."""
    random = Random(seed)
    running: list[tuple[int, int]] = []
    requests: Requests = []
    begun = 0
    while len(requests) < count:
        if len(running) < 60:
            running.append((begun, 4))
            begun += 1
        at = random.randrange(len(running))
        which, length = running[at]
        requests.append(chain(length, seed, which))
        running[at] = (which, length + 2)
        if length >= 18:
            running.pop(at)
    return requests


def popular(seed: int, count: int) -> Requests:
    """Documents of three blocks, asked for as often as by independent draws: counts say it all."""
    random = Random(seed)
    weights = [1 / (1 + rank) for rank in range(2000)]
    return [chain(3, seed, document) for document in random.choices(range(2000), weights=weights, k=count)]


def test_is_near_lru_where_the_recent_comes_back() -> None:
    requests = conversations(1, 6000)
    assert hits(requests, 900) >= 0.93 * lru_hits(requests, 900)


def test_is_near_lfu_where_the_popular_comes_back() -> None:
    requests = popular(2, 15_000)
    assert hits(requests, 300) >= 0.85 * best_fixed_hits(requests, 300)
    assert hits(requests, 300) >= 1.05 * lru_hits(requests, 300)


def test_follows_when_the_traffic_changes() -> None:
    requests = popular(3, 8000) + conversations(4, 6000)
    after = requests[8000:]
    cache = PolicyCache(900)
    for names in requests[:8000]:
        cache.request(names)
    assert sum(map(cache.request, after)) >= 0.8 * lru_hits(after, 900)


@pytest.mark.parametrize("between", ["nothing", "what never comes back"])
def test_follows_when_all_of_the_traffic_changes(between: str) -> None:
    """What came round for long and never comes again must not keep out what comes now."""
    cache = PolicyCache(1024)
    for number in [*range(115)] * 30:
        cache.request(chain(8, "old", number))
    if between != "nothing":
        for number in range(1024):
            cache.request(chain(8, "once", number))
    hits, blocks = 0, 0
    for number in range(1000):
        for names in (chain(8, "new", number), chain(8, "new", max(0, number - 16))):
            hits += cache.request(names)
            blocks += len(names)
    assert hits >= 0.4 * blocks, "LRU has half of them"


@pytest.mark.skipif(not TRACE.is_file(), reason=f"{TRACE} is not there: Mooncake's conversation trace")
@pytest.mark.parametrize(
    ("capacity", "at_least"), [(1000, 0.0747), (5859, 0.1788), (20_000, 0.2996), (50_000, 0.3546)]
)
def test_the_conversation_trace(capacity: int, at_least: float) -> None:
    requests = [
        [BlockHash(int(block).to_bytes(16, "little")) for block in json.loads(line)["hash_ids"]]
        for line in TRACE.read_text().splitlines()
    ]
    named = [[BlockHash(blake2b(one, digest_size=16).digest()) for one in names] for names in requests]
    assert hits(named, capacity) / sum(map(len, named)) >= at_least
