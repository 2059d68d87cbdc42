"""What a cache and a policy are to a replay.

A *cache* hears whole requests. A textbook *policy* hears one block at a time, by number, and never that
blocks are chained: that is how the literature defines and compares them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from scripts.simulate.trace import Trace

Key = TypeVar("Key")
Key_contra = TypeVar("Key_contra", contravariant=True)


class Cache(Protocol[Key_contra]):
    """A cache of at most `capacity` blocks."""

    def request(self, chain: Sequence[Key_contra]) -> int:
        """A prompt of these blocks comes and is computed; how many of them, from the front, were here."""
        ...


class Policy(Protocol):
    """Which blocks are here, under one published rule."""

    def __contains__(self, block: int) -> bool: ...

    def touch(self, block: int) -> None:
        """`block` is used. It is here afterwards, unless the rule admits others only; another may be gone."""
        ...


@dataclass(frozen=True)
class Contestant(Generic[Key]):
    """How to make a cache, and what it knows the blocks of the trace's n-th request by."""

    cache: Callable[[int, Trace], Cache[Key]]
    chain: Callable[[Trace, int], Sequence[Key]]
