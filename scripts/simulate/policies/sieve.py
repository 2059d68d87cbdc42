"""SIEVE: a queue that a hand goes over from old to new, sparing what was used since its last visit.

Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for
web caches", NSDI 2024.

On traces of prompts it often has the very hits of LFU: what was used again gathers behind the hand, until the
part of the queue that is left to new blocks is shorter than one prompt, and nothing new is ever used there.
"""

_NONE = -1


class Sieve:
    """A doubly linked queue, new blocks at its head; what is spared stays where it is."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._visited: dict[int, bool] = {}
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._head = self._tail = self._hand = _NONE

    def __contains__(self, block: int) -> bool:
        return block in self._visited

    def touch(self, block: int) -> None:
        """See Policy."""
        if block in self._visited:
            self._visited[block] = True
            return
        if len(self._visited) >= self._capacity:
            self._evict()
        self._visited[block] = False
        self._newer[block], self._older[block] = _NONE, self._head
        if self._head != _NONE:
            self._newer[self._head] = block
        self._head = block
        if self._tail == _NONE:
            self._tail = block

    def _evict(self) -> None:
        visited, newer = self._visited, self._newer
        victim = self._tail if self._hand == _NONE else self._hand
        while visited[victim]:
            visited[victim] = False
            victim = newer[victim] if newer[victim] != _NONE else self._tail
        self._hand = newer[victim]
        self._unlink(victim)

    def _unlink(self, block: int) -> None:
        del self._visited[block]
        newer, older = self._newer.pop(block), self._older.pop(block)
        if newer == _NONE:
            self._head = older
        else:
            self._older[newer] = older
        if older == _NONE:
            self._tail = newer
        else:
            self._newer[older] = newer
