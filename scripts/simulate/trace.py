"""Requests as chains of blocks, in columns: four bytes a block, sixteen more a distinct one.

A block is known by what is before it as well as by its id: KV of the same tokens behind another prefix is
other KV. In a trace whose ids are chained, as Mooncake's are, that is the id itself.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cachemgr.contract import BlockHash

NAME_NBYTES = 16
_PARENT_BITS = 32
_NO_PARENT = (1 << _PARENT_BITS) - 1


@dataclass(frozen=True)
class Trace:
    """Distinct blocks have the numbers 0 … distinct − 1, in order of appearance."""

    title: str
    numbers: "array[int]"
    """Blocks of all requests, one after another."""
    ends: "array[int]"
    """Where each request's blocks end in `numbers`."""
    names: bytes
    """16 bytes a distinct block, as the product would know it."""
    foreign: int
    """Distinct blocks whose id stands behind several prefixes: 0 if the ids are chained."""

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.ends)

    @property
    def blocks(self) -> int:
        """Block accesses: the sum of the requests' lengths."""
        return len(self.numbers)

    @property
    def distinct(self) -> int:
        """How many different blocks."""
        return len(self.names) // NAME_NBYTES

    def blocks_of(self, request: int) -> Sequence[int]:
        """Numbers of the request's blocks, front first."""
        first = self.ends[request - 1] if request else 0
        return self.numbers[first : self.ends[request]].tolist()

    def names_of(self, request: int) -> Sequence[BlockHash]:
        """Names of the request's blocks, front first."""
        names = self.names
        return [
            BlockHash(names[NAME_NBYTES * number : NAME_NBYTES * (number + 1)])
            for number in self.blocks_of(request)
        ]


class TraceBuilder:
    """Takes requests one by one and numbers their blocks."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._known: dict[int, int] = {}
        """Number of a block by its id, shifted, and its parent: an integer is a third of a pair's size."""
        self._numbers = array("i")
        self._ends = array("q")
        self._names = bytearray()

    @property
    def blocks(self) -> int:
        """Block accesses so far."""
        return len(self._numbers)

    def add(self, ids: Sequence[int]) -> None:
        """One request: ids of its blocks, front first. They may be any whole numbers below 2^127 in size."""
        known, numbers, parent = self._known, self._numbers, _NO_PARENT
        for block_id in ids:
            key = (block_id << _PARENT_BITS) + parent
            number = known.get(key)
            if number is None:
                number = known[key] = len(known)
                self._names += self._name(parent, block_id)
            numbers.append(number)
            parent = number
        self._ends.append(len(numbers))

    def done(self) -> Trace:
        """What was added."""
        foreign = len(self._known) - len({key >> _PARENT_BITS for key in self._known})
        return Trace(self._title, self._numbers, self._ends, bytes(self._names), foreign)

    def _name(self, parent: int, block_id: int) -> bytes:
        own = block_id.to_bytes(NAME_NBYTES, "little", signed=True)
        before = b""
        if parent != _NO_PARENT:
            before = bytes(self._names[NAME_NBYTES * parent : NAME_NBYTES * (parent + 1)])
        return hashlib.blake2b(before + own, digest_size=NAME_NBYTES).digest()
