"""Replays: what is counted and timed, and the published trace's known hit rates."""

from pathlib import Path

import pytest

from cachemgr.eviction import PolicyCache
from scripts.simulate.policies import CONTESTANTS, OURS, TEXTBOOK
from scripts.simulate.replay import replay
from scripts.simulate.trace import Trace
from scripts.simulate.trace_file import read_trace
from tests.scripts.simulate.traces import made

CONVERSATION = Path(__file__).resolve().parents[4] / "shared" / "traces" / "conversation_trace.jsonl"
CAPACITIES = (1000, 5859, 20_000, 50_000)
KNOWN = {  # measured elsewhere, by another program
    "fifo": (0.0445, 0.1254, 0.2585, 0.3336),
    "lru": (0.0445, 0.1361, 0.2878, 0.3546),
    "lfu": (0.0481, 0.0969, 0.2104, 0.3438),
    "lru-2": (0.0747, 0.1788, 0.2506, 0.3430),
    "sieve": (0.0481, 0.0969, 0.2104, 0.3438),
    "s3-fifo": (0.0556, 0.1538, 0.2503, 0.3435),
    "w-tinylfu": (0.0635, 0.1448, 0.2101, 0.2637),
    "optimum": (0.1907, 0.3532, 0.3664, 0.3664),
    "infinite": (0.3664, 0.3664, 0.3664, 0.3664),
}


@pytest.fixture(scope="module")
def conversation() -> Trace:
    if not CONVERSATION.is_file():
        pytest.skip(f"the conversation trace of Mooncake is not at {CONVERSATION}")
    return read_trace(CONVERSATION)


def test_the_conversation_trace(conversation: Trace) -> None:
    assert (conversation.requests, conversation.blocks, conversation.distinct) == (12_031, 288_500, 182_790)
    assert conversation.foreign == 0


@pytest.mark.parametrize("policy", KNOWN)
def test_known_hit_rates(conversation: Trace, policy: str) -> None:
    rates = [replay(conversation, policy, capacity=capacity).block_hit_rate for capacity in CAPACITIES]
    assert tuple(round(rate, 4) for rate in rates) == KNOWN[policy]


def test_only_requests_are_timed() -> None:
    """The clock is read before and after a batch of requests, in which nothing else happens."""
    readings = iter([10.0, 10.5, 20.0, 21.0])
    trace = made([[1, 2]] * 300)
    measured = replay(trace, "lru", capacity=2, clock=lambda: next(readings))
    assert measured.touch_us == pytest.approx(1.5 / 600 * 1e6)
    assert (measured.policy, measured.capacity, measured.blocks, measured.hits) == ("lru", 2, 600, 598)
    assert measured.block_hit_rate == pytest.approx(598 / 600)


def test_every_block_is_told_as_it_passes() -> None:
    passed: list[int] = []
    replay(made([[1, 2], [], [1]] * 200), "fifo", capacity=2, advance=passed.append)
    assert sum(passed) == 600
    assert len(passed) > 1


def test_ours_is_the_product() -> None:
    """Its own class, asked with names as it has them."""
    trace = made([[1, 2], [1, 3]])
    cache = CONTESTANTS[OURS].cache(4, trace)
    assert type(cache) is PolicyCache
    first, second = (CONTESTANTS[OURS].chain(trace, request) for request in range(2))
    assert [len(name) for name in first] == [16, 16]
    assert first[0] == second[0]
    assert len({*first, *second}) == 3
    assert (cache.request(first), cache.request(second)) == (0, 1)


def test_the_textbook_is_whole() -> None:
    assert TEXTBOOK == ("fifo", "lru", "lfu", "lru-2", "sieve", "s3-fifo", "w-tinylfu")
