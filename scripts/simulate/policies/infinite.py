"""Infinite: nothing ever goes; what remains are the misses of blocks that were never here."""

from collections.abc import Sequence


class Infinite:
    """All blocks seen."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def request(self, chain: Sequence[int]) -> int:
        """See Cache."""
        seen = self._seen
        hit = 0
        for block in chain:
            if block not in seen:
                break
            hit += 1
        seen.update(chain)
        return hit
