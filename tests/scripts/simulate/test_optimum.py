"""The offline optimum: no policy passes it, and searching all choices finds nothing better."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.simulate.policies import CONTESTANTS, INFINITE, OPTIMUM
from scripts.simulate.replay import replay
from scripts.simulate.trace import Trace
from tests.scripts.simulate.traces import chains, made


def best_of_all_choices(trace: Trace, capacity: int) -> int:
    """Hits of the best way to hold at most `capacity` blocks between requests, by trying all."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for request in range(trace.requests):
        chain = trace.blocks_of(request)
        after: dict[frozenset[int], int] = {}
        for here, hits in best.items():
            gap = next((at for at, block in enumerate(chain) if block not in here), len(chain))
            choice = here | set(chain)
            for kept in combinations(sorted(choice), min(capacity, len(choice))):
                state = frozenset(kept)
                after[state] = max(after.get(state, 0), hits + gap)
        best = after
    return max(best.values())


@given(requests=chains, capacity=st.integers(1, 12))
def test_none_is_better(requests: list[tuple[int, ...]], capacity: int) -> None:
    trace = made(requests)
    most = replay(trace, OPTIMUM, capacity=capacity).hits
    for policy in CONTESTANTS:
        if policy != INFINITE:
            assert replay(trace, policy, capacity=capacity).hits <= most, policy


@settings(max_examples=60)
@given(requests=chains.map(lambda requests: requests[:6]), capacity=st.integers(1, 4))
def test_as_good_as_the_best_choice(requests: list[tuple[int, ...]], capacity: int) -> None:
    if any(requests):
        trace = made(requests)
        assert replay(trace, OPTIMUM, capacity=capacity).hits == best_of_all_choices(trace, capacity)


def test_by_hand() -> None:
    requests = [[1, 2], [3], [1, 2], [4], [3], [1]]
    # with one block: 3 is held over requests 2 … 5, or 1 over 1 … 3 and 3 … 6: two hits, not one
    assert replay(made(requests), OPTIMUM, capacity=1).hits == 2
    assert replay(made(requests), OPTIMUM, capacity=2).hits == 3
    assert replay(made(requests), OPTIMUM, capacity=3).hits == 4


@pytest.mark.parametrize("policy", CONTESTANTS)
@given(requests=chains)
def test_with_room_for_all_everything_seen_is_a_hit(policy: str, requests: list[tuple[int, ...]]) -> None:
    trace = made(requests)
    assert replay(trace, policy, capacity=10**15).hits == trace.blocks - trace.distinct
