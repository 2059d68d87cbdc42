"""What the tier keeps, in memory: a numbered row per block, and the product's policy over them.

Invariants
- Rows say what is committed, but for those that `make_room` took: they are `gone` with the transaction, or
  `restore`d with it.
- Names are changed by the writer only. The loop and the reader ask whether one is there: one look into a
  dictionary, which needs no lock.

Threads: the tier's writer, but for `__contains__` and `leading`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.eviction import AdaptivePolicy, EvictionPolicy
from cachemgr.shard import BlockAddress
from cachemgr.tiers.lmdb_tier.record import RECORD_DTYPE, disk_nbytes

_LEAST_ROWS, _MOST_ROWS = 1024, 8_000_000


def rows_for(bound: int, *, payload_nbytes: int) -> int:
    """Rows of a table for blocks of this size in a file of `bound` bytes."""
    return min(_MOST_ROWS, max(_LEAST_ROWS, bound // disk_nbytes(payload_nbytes)))


@dataclass(frozen=True, slots=True)
class Gone:
    """A block that was taken out of the rows."""

    name: BlockHash
    depth: int
    payload_nbytes: int
    stamp: int


class Rows:
    """At most `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.policy: EvictionPolicy = AdaptivePolicy(capacity)
        self._rows: dict[bytes, int] = {}
        self._names: list[BlockHash | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._payload_nbytes = np.zeros(capacity, np.uint32)
        self._depths = np.zeros(capacity, np.uint32)
        self._stamps = np.zeros(capacity, np.uint64)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: bytes) -> bool:
        return name in self._rows

    def leading(self, blocks: Sequence[BlockAddress]) -> int:
        """How many of `blocks`, from the first, are kept."""
        rows = self._rows
        for count, address in enumerate(blocks):
            if address.hash not in rows:
                return count
        return len(blocks)

    @classmethod
    def found(cls, names: list[bytes], records: list[bytes], *, bound: int) -> tuple["Rows", int]:
        """What is on disk, oldest stamp first, deepest first of each; and the last stamp given."""
        found = np.frombuffer(b"".join(records), RECORD_DTYPE)
        order = np.lexsort((-found["header"]["index"].astype(np.int64), found["stamp"]))
        smallest = int(found["header"]["length"].min(initial=1 << 30))
        rows = cls(max(rows_for(bound, payload_nbytes=smallest), len(names)))
        rows._load([BlockHash(names[at]) for at in order.tolist()], found[order])
        return rows, int(found["stamp"].max(initial=0))

    def widen(self, capacity: int) -> "Rows":
        """The same in a larger table: only what came in after what is known."""
        wider = Rows(capacity)
        self._copy_into(wider)
        return wider

    def enter(self, address: BlockAddress, *, payload_nbytes: int, stamp: int) -> None:
        """A block was written. There is a free row: see `make_room`."""
        self._enter(Gone(address.hash, address.index, payload_nbytes, stamp), address.parent)

    def use(self, names: Sequence[bytes]) -> None:
        """Blocks of a chain, from its front, were used: its end goes before its front."""
        rows = [row for name in names if (row := self._rows.get(name)) is not None]
        pinned = [row for row in dict.fromkeys(rows) if row in self.policy]
        for row in pinned:
            self.policy.pin(row)
        for row in reversed(pinned):
            self.policy.release(row)

    def make_room(self, nbytes: int, *, rows: int, most: int) -> list[Gone]:
        """Take out what goes for `nbytes` of file and `rows` free rows, at most `most` blocks at once."""
        gone: list[Gone] = []
        freed = 0
        while (freed < nbytes or len(self._free) < rows) and len(gone) < most:
            row = self.policy.victim()
            if row is None:
                break
            self.policy.evict(row)
            gone.append(self._take(row))
            freed += disk_nbytes(gone[-1].payload_nbytes)
        return gone

    def restore(self, gone: Sequence[Gone]) -> None:
        """The transaction that would have removed these came to nothing."""
        for block in gone:
            self._enter(block, b"")

    def drop(self, name: bytes, stamp: int) -> Gone | None:
        """Take out a block that was found wrong, unless it was replaced since."""
        row = self._rows.get(name)
        if row is None or int(self._stamps[row]) != stamp:
            return None
        self.policy.forget(row)
        return self._take(row)

    def _load(self, names: list[BlockHash], records: npt.NDArray[np.void]) -> None:
        count = len(names)
        numbers = np.arange(count, dtype=np.int32)
        self._payload_nbytes[:count] = records["header"]["length"]
        self._depths[:count] = records["header"]["index"]
        self._stamps[:count] = records["stamp"]
        self._names[:count] = names
        self._rows.update(zip(names, numbers.tolist(), strict=True))
        self._free = list(range(self.capacity - 1, count - 1, -1))
        self.policy.enter_many(numbers, names, self._depths[:count])

    def _enter(self, block: Gone, parent: bytes) -> None:
        row = self._free.pop()
        self._names[row] = block.name
        self._payload_nbytes[row] = block.payload_nbytes
        self._depths[row] = block.depth
        self._stamps[row] = block.stamp
        self._rows[block.name] = row
        self.policy.enter(
            row, block.name, depth=block.depth, parent=self._rows.get(parent), cheap=False
        )  # what it costs to compute again is what this tier is for

    def _take(self, row: int) -> Gone:
        name = self._names[row]
        assert name is not None
        self._names[row] = None
        del self._rows[name]
        self._free.append(row)
        size, depth, stamp = (column[row] for column in self._columns())
        return Gone(name, int(depth), int(size), int(stamp))

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return (self._payload_nbytes, self._depths, self._stamps)

    def _copy_into(self, wider: "Rows") -> None:
        rows = np.array(sorted(self._rows.values(), key=lambda row: int(self._stamps[row])), np.int32)
        for row in rows.tolist():
            name = self._names[row]
            assert name is not None
            size, depth, stamp = (column[row] for column in self._columns())
            wider._enter(Gone(name, int(depth), int(size), int(stamp)), b"")
