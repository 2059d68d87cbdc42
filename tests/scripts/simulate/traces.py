"""Small traces for tests, and one block at a time through a policy."""

from collections.abc import Sequence

from hypothesis import strategies as st

from scripts.simulate.contract import Policy
from scripts.simulate.trace import Trace, TraceBuilder

chains = st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), min_size=1, max_size=30).filter(
    lambda requests: any(requests)
)
"""Requests that share prefixes: equal ids behind equal prefixes are equal blocks."""


def made(requests: Sequence[Sequence[int]]) -> Trace:
    builder = TraceBuilder("made")
    for ids in requests:
        builder.add(ids)
    return builder.done()


def touched(policy: Policy, blocks: Sequence[int]) -> list[bool]:
    """Which of the blocks were there when they came."""
    found = []
    for block in blocks:
        found.append(block in policy)
        policy.touch(block)
    return found


def there(policy: Policy, among: range) -> set[int]:
    return {block for block in among if block in policy}
