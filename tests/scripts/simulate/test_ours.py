"""The product's policy beside the textbook's on traffic of several kinds: near the best everywhere."""

import pytest

from scripts.simulate.generate import generate
from scripts.simulate.policies import TEXTBOOK
from scripts.simulate.replay import replay
from scripts.simulate.trace import TraceBuilder

SEED, REQUESTS = 5, 6000


@pytest.mark.parametrize(("kind", "capacity"), [("zipf", 1000), ("chat", 4000), ("agent", 1000)])
def test_near_or_above_the_best_of_the_textbook(kind: str, capacity: int) -> None:
    builder = TraceBuilder(kind)
    for request in generate(kind, seed=SEED, requests=REQUESTS):
        builder.add(request.hash_ids)
    trace = builder.done()
    best = max(replay(trace, policy, capacity=capacity).block_hit_rate for policy in TEXTBOOK)
    assert replay(trace, "ours", capacity=capacity).block_hit_rate >= 0.97 * best
