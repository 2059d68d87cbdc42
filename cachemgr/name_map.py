"""Name → slot, in parts of about a thousand names, so that no insertion moves more than those.

A dictionary does not use the room of deleted entries again. In a full cache each new name replaces one: a
single dictionary is built anew now and then, all at once, and with room for three times its names. A part is
built anew in tens of microseconds, and before it grows: 37 bytes a name instead of 84, beside the name.

Threads: no lock inside.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain

from cachemgr.contract import BlockHash

_NAMES = 1000
"""In a part of a full map. A table of CPython's takes 1365 and then grows, so that it is good for …"""
_GONE = 200
"""… so many that were deleted, and for parts that are fuller than others."""
_HASH_SHIFT = 20
"""Dictionaries choose places by the low bits of a hash, so parts are chosen by others."""


class NameMap:
    """For about `capacity` names."""

    __slots__ = ("_count", "_gone", "_parts", "_size")

    def __init__(self, capacity: int) -> None:
        self._count = max(1, -(-capacity // _NAMES))
        self._parts: list[dict[BlockHash, int]] = [{} for _ in range(self._count)]
        self._gone = array("H", [0]) * self._count
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, name: BlockHash) -> int | None:
        """Its slot."""
        return self._parts[(hash(name) >> _HASH_SHIFT) % self._count].get(name)

    def insert(self, name: BlockHash, slot: int) -> bool:
        """Give a new name its slot; False if it has one already."""
        part = self._parts[(hash(name) >> _HASH_SHIFT) % self._count]
        if name in part:
            return False
        part[name] = slot
        self._size += 1
        return True

    def insert_many(self, names: Sequence[BlockHash], slots: Sequence[int]) -> list[bool]:
        """The same for many."""
        parts, count = self._parts, self._count
        new: list[bool] = []
        for name, slot in zip(names, slots, strict=True):
            part = parts[(hash(name) >> _HASH_SHIFT) % count]
            if is_new := name not in part:
                part[name] = slot
            new.append(is_new)
        self._size += sum(new)
        return new

    def remove(self, name: BlockHash) -> None:
        """Forget a name that is there."""
        at = (hash(name) >> _HASH_SHIFT) % self._count
        part = self._parts[at]
        del part[name]
        self._size -= 1
        self._gone[at] += 1
        if self._gone[at] > _GONE:
            self._parts[at] = fresh = {}
            fresh.update(part)  # without the room of those deleted
            self._gone[at] = 0

    def items(self) -> Iterator[tuple[BlockHash, int]]:
        """All of them; O(n)."""
        return chain.from_iterable(part.items() for part in self._parts)
