"""A prompt that grows, as ids of its blocks of 512 tokens.

A whole block keeps its id for ever; a last one that is not full has an id of its own, for what follows
changes its content. Every id is given once, so ids are chained.
"""

from collections.abc import Iterator

BLOCK_TOKENS = 512


class Prompt:
    """What was said so far. `fork` is another one with the same beginning."""

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._whole: list[int] = []
        self._rest: list[int] = []
        self.tokens = 0

    def grow(self, tokens: int) -> "Prompt":
        """So many tokens more; at least one."""
        self.tokens += tokens
        self._whole += [next(self._ids) for _ in range(self.tokens // BLOCK_TOKENS - len(self._whole))]
        self._rest = [next(self._ids)] if self.tokens % BLOCK_TOKENS else []
        return self

    def fork(self) -> "Prompt":
        """A prompt that is equal now and goes its own way."""
        other = Prompt(self._ids)
        other.tokens, other._whole, other._rest = self.tokens, list(self._whole), list(self._rest)
        return other

    @property
    def chain(self) -> list[int]:
        """Ids of its blocks, front first."""
        return self._whole + self._rest
