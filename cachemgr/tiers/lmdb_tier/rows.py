"""What the tier keeps, in memory: a numbered row per block, and the product's policy over them.

Invariants
- Rows say what is committed, but for those that `make_room` took: they are `gone` with the transaction, or
  `restore`d with it.
- Names are changed by the writer only. The loop and the reader ask whether one is there: one look into a
  dictionary, which needs no lock.

Threads: the tier's writer, but for `__contains__` and `leading`.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockHash
from cachemgr.eviction import AdaptivePolicy, EvictionPolicy
from cachemgr.tiers.lmdb_tier.record import RECORD_DTYPE, disk_nbytes

LEAST_ROWS, _MOST_ROWS = 1024, 8_000_000
MANY_ROWS = 1 << 16
"""Tables of up to so many rows are made at once: in a larger one the policy learns anew."""

_FOLLOWED = 1024
"""Blocks of a chain; the policy follows several times as many in one look."""


def rows_for(bound: int, *, payload_nbytes: int, enough: int) -> int:
    """Rows of a table for blocks of this size in a file of `bound` bytes; no more than are enough for now."""
    return min(_MOST_ROWS, enough, max(LEAST_ROWS, bound // disk_nbytes(payload_nbytes)))


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of a block."""

    key: BlockHash
    depth: int
    payload_nbytes: int
    stamp: int
    parent: bytes = b""
    """Key of the block before it, if it has one."""


class Rows:
    """At most `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.policy: EvictionPolicy = AdaptivePolicy(capacity)
        self._rows: dict[bytes, int] = {}
        self._keys: list[BlockHash | None] = [None] * capacity
        self._parents: list[BlockHash | None] = [None] * capacity
        """Keys of blocks that were here when their children came."""
        self._free: list[int] = []
        self._never_used = 0
        """Rows from here on were never used."""
        self._payload_nbytes = np.zeros(capacity, np.uint32)
        self._depths = np.zeros(capacity, np.uint32)
        self._stamps = np.zeros(capacity, np.uint64)

    @property
    def free(self) -> int:
        """Rows that no block has."""
        return self.capacity - len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def number(self, key: bytes) -> int | None:
        """The row of a block."""
        return self._rows.get(key)

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many of `keys`, from the first, are kept."""
        return sum(1 for _ in itertools.takewhile(self._rows.__contains__, keys))

    @classmethod
    def found(cls, keys: list[bytes], records: list[bytes], *, bound: int) -> tuple["Rows", int]:
        """What is on disk, longest unchanged chain first, each from its end; and the last stamp given."""
        found = np.frombuffer(b"".join(records), RECORD_DTYPE)
        depths = -found["header"]["index"].astype(np.int64)
        parents = parents_of(keys, found["header"])
        grown = found["stamp"].tolist()
        for at in np.argsort(depths, kind="stable").tolist():  # a front goes no sooner than what needs it
            parent = parents[at]
            if parent != -1 and grown[parent] < grown[at]:
                grown[parent] = grown[at]
        order = np.lexsort((depths, np.array(grown, np.uint64)))
        smallest = int(found["header"]["length"].min(initial=1 << 30))
        enough = max(2 * len(keys), MANY_ROWS)
        rows = cls(max(len(keys), rows_for(bound, payload_nbytes=smallest, enough=enough)))
        rows._load([BlockHash(keys[at]) for at in order.tolist()], found[order])
        rows._parents[: len(keys)] = [
            None if parents[at] == -1 else BlockHash(keys[parents[at]]) for at in order.tolist()
        ]
        return rows, int(found["stamp"].max(initial=0))

    def widen(self, capacity: int) -> "Rows":
        """The same blocks in a larger table. Of what was learned, only their order and families are kept."""
        wider = Rows(capacity)
        for row in sorted(self._rows.values(), key=lambda row: (self._stamps[row], self._depths[row])):
            wider.enter(self._at(row))
        return wider

    def enter(self, block: Row) -> None:
        """A block was written. There is a free row: see `make_room`."""
        if self._free:
            row = self._free.pop()
        else:
            row, self._never_used = self._never_used, self._never_used + 1
        self._keys[row] = block.key
        self._payload_nbytes[row] = block.payload_nbytes
        self._depths[row] = block.depth
        self._stamps[row] = block.stamp
        self._rows[block.key] = row
        parent = self._rows.get(block.parent)
        self._parents[row] = None if parent is None else self._keys[parent]
        # No block is cheap here: what it would cost to compute again is what this tier is for.
        self.policy.enter(row, block.key, depth=block.depth, parent=parent, cheap=False)

    def use(self, keys: Sequence[bytes]) -> None:
        """Blocks of a chain, from its front, were used: its end goes before its front."""
        rows = [row for key in keys if (row := self._rows.get(key)) is not None]
        pinned = [row for row in dict.fromkeys(rows) if row in self.policy]
        for row in pinned:
            self.policy.pin(row)
        for row in reversed(pinned):
            self.policy.release(row)

    def make_room(self, nbytes: int, *, rows: int, most: int) -> list[Row]:
        """Take out what goes for `nbytes` of file and `rows` free rows, at most `most` blocks at once."""
        gone: list[Row] = []
        freed = 0
        while (freed < nbytes or self.free < rows) and len(gone) < most:
            row = self._victim()
            if row is None:
                break
            self.policy.evict(row, self._keys[row])
            gone.append(self._take(row))
            freed += disk_nbytes(gone[-1].payload_nbytes)
        return gone

    def restore(self, gone: Sequence[Row]) -> None:
        """The transaction that would have removed these came to nothing."""
        for block in reversed(gone):  # ends of chains were taken first
            self.enter(block)

    def drop(self, key: bytes, stamp: int) -> Row | None:
        """Take out a block that was found wrong, unless it was replaced since."""
        row = self._rows.get(key)
        if row is None or int(self._stamps[row]) != stamp:
            return None
        self.policy.forget(row)
        return self._take(row)

    def _victim(self) -> int | None:
        """What goes next: there is always something, but the policy follows a long chain in several looks."""
        looks = 1 + len(self._rows) // _FOLLOWED
        return next((row for _ in range(looks) if (row := self.policy.victim()) is not None), None)

    def _load(self, keys: list[BlockHash], records: npt.NDArray[np.void]) -> None:
        count = len(keys)
        numbers = np.arange(count, dtype=np.int32)
        self._payload_nbytes[:count] = records["header"]["length"]
        self._depths[:count] = records["header"]["index"]
        self._stamps[:count] = records["stamp"]
        self._keys[:count] = keys
        self._rows.update(zip(keys, numbers.tolist(), strict=True))
        self._never_used = count
        self.policy.enter_many(numbers, keys, self._depths[:count])

    def _take(self, row: int) -> Row:
        block = self._at(row)
        self._keys[row] = self._parents[row] = None
        del self._rows[block.key]
        self._free.append(row)
        return block

    def _at(self, row: int) -> Row:
        key = self._keys[row]
        assert key is not None
        columns = (self._depths, self._payload_nbytes, self._stamps)
        depth, payload_nbytes, stamp = (int(column[row]) for column in columns)
        return Row(key, depth, payload_nbytes, stamp, self._parents[row] or b"")


def parents_of(keys: Sequence[bytes], headers: npt.NDArray[np.void]) -> list[int]:
    """Where among `keys` the block before each is; -1 if it is not."""
    numbers = {key: number for number, key in enumerate(keys)}
    names, parents = (
        np.ascontiguousarray(headers[field]).view(np.uint64).reshape(-1, 2) for field in ("hash", "parent")
    )
    own = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
    wanted = (own ^ names ^ parents).tobytes()  # a key is a name and the mask of its format
    return [numbers.get(wanted[at : at + 16], -1) for at in range(0, len(wanted), 16)]
