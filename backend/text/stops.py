"""Finds the first stop word in a text that arrives in pieces, and how much of its tail may still become one.

The rule, on the whole text: of all occurrences the one that starts first wins (of several that start there
the longest; the text before it is the same). The text is cut at its start. An occurrence is only *decided*
once no stop word that starts before it can still be completed, so that the result does not depend on how the
text was split.

The search is Aho and Corasick's automaton ("Efficient string matching", CACM 1975): a few dictionary steps a
character, whatever the number of words; the depth of its state is the length of the tail that may still
become a stop word.
"""

from collections import deque
from collections.abc import Iterable


class StopWords:
    """The automaton for a set of stop words; empty ones are ignored. Immutable, shared by matchers.

    Node 0 is the root. `steps[node]` maps a character to the next node, `fallbacks[node]` is the node of the
    longest proper suffix, `depths[node]` the length of the prefix it stands for, `found[node]` the longest
    stop word that ends there (0: none).
    """

    __slots__ = ("depths", "fallbacks", "found", "steps")

    def __init__(self, words: Iterable[str]) -> None:
        self.steps: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.found = [0]
        for word in words:
            self._insert(word)
        self.fallbacks = [0] * len(self.steps)
        self._link()

    def __bool__(self) -> bool:
        return len(self.steps) > 1

    def _insert(self, word: str) -> None:
        node = 0
        for char in word:
            following = self.steps[node].get(char)
            if following is None:
                following = len(self.steps)
                self.steps[node][char] = following
                self.steps.append({})
                self.depths.append(self.depths[node] + 1)
                self.found.append(0)
            node = following
        self.found[node] = len(word)

    def _link(self) -> None:
        """Set fallbacks in order of depth: a node's fallback is shallower, so it is finished first."""
        queue = deque(self.steps[0].values())
        while queue:
            node = queue.popleft()
            for char, following in self.steps[node].items():
                queue.append(following)
                fallback = self.fallbacks[node]
                while fallback and char not in self.steps[fallback]:
                    fallback = self.fallbacks[fallback]
                self.fallbacks[following] = self.steps[fallback].get(char, 0)
                if not self.found[following]:
                    self.found[following] = self.found[self.fallbacks[following]]


class StopMatcher:
    """One text's way through the automaton. Offsets count characters from the start of the text."""

    __slots__ = ("_length", "_node", "_words", "start")

    def __init__(self, words: StopWords) -> None:
        self._words = words
        self._node = 0
        self._length = 0
        self.start: int | None = None
        """Where the best occurrence so far starts."""

    def feed(self, text: str) -> bool:
        """Take the next piece; True once the occurrence at `start` is decided. Feed nothing after that."""
        words = self._words
        steps, fallbacks, found = words.steps, words.fallbacks, words.found
        node, length = self._node, self._length
        for char in text:
            length += 1
            while node and char not in steps[node]:
                node = fallbacks[node]
            node = steps[node].get(char, 0)
            if found[node]:
                start = length - found[node]
                if self.start is None or start < self.start:
                    self.start = start
            if self.start is not None and length - words.depths[node] >= self.start:
                self._node, self._length = node, length
                return True
        self._node, self._length = node, length
        return False

    def skip(self, text: str) -> None:
        """Take the next piece; no occurrence that ends in it counts."""
        words = self._words
        node = self._node
        for char in text:
            while node and char not in words.steps[node]:
                node = words.fallbacks[node]
            node = words.steps[node].get(char, 0)
        self._node, self._length = node, self._length + len(text)

    @property
    def clear(self) -> int:
        """No stop word starts before this offset, whatever follows."""
        pending = self._length - self._words.depths[self._node]
        return pending if self.start is None else min(pending, self.start)
