"""What penalties count, kept on the device: one slot per sequence, one column per distinct token of it.

The rows own their histories; a slot is a copy that follows. A step ships the one column that the last
accepted token changed; a whole history goes over once, when its row is first met, or if more than one token
came since. A slot is free again when its row is forgotten. Threads: one owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from backend.sampling.rows import SequenceRow, TokenHistory

Torch = Any
Tensor = Any
Doubles = npt.NDArray[np.float64]

_SLOTS: Final = 8
_WIDTH: Final = 256


@dataclass(slots=True)
class _Copy:
    slot: int
    position: int


class DeviceHistories:
    """Slots [slots, width] of token ids and counts; both grow by doubling. Unused columns hold the id V."""

    def __init__(self, torch: Torch, vocab_size: int, *, device: str) -> None:
        self._torch = torch
        self._vocab_size = vocab_size
        self._device = device
        self._copies: WeakKeyDictionary[SequenceRow, _Copy] = WeakKeyDictionary()
        self._make_room(_SLOTS, _WIDTH)

    def changes(self, rows: Sequence[SequenceRow]) -> tuple[Doubles, Doubles, Doubles, Doubles]:
        """Slot of each row, then cells, ids and counts to write with `apply` before `penalise`."""
        if not rows:
            return (np.empty(0),) * 4
        slots, width = self._ids.shape
        live = len({*self._copies, *rows})
        longest = max(len(_history(row)) for row in rows)
        if longest > width or live > slots:
            self._make_room(_doubled(slots, live), _doubled(width, longest))
        changed = [self._change(row) for row in rows]
        where = np.array([self._copies[row].slot for row in rows], dtype=np.float64)
        cells, ids, counts = (np.concatenate([one[i] for one in changed]) for i in range(3))
        return where, cells, ids, counts

    def apply(self, cells: Tensor, ids: Tensor, counts: Tensor) -> None:
        """Write columns, as `changes` gave them and shipped (float64 [n])."""
        at = cells.long()
        self._ids.view(-1).scatter_(0, at, ids.long())
        self._counts.view(-1).scatter_(0, at, counts.float())

    def penalise(self, logits: Tensor, slots: Tensor, *, first: Tensor, rates: Tensor, width: int) -> None:
        """In place, as TokenHistory.penalise does: of rows of `logits` [n, C], C > V, contiguous.

        `first` int64 [m] is where each of m rows begins in the flat logits, `rates` float32 [3, m] its
        repetition, frequency and presence penalty, `width` the length of the longest history.
        """
        ids = self._ids[:, :width].index_select(0, slots)
        counts = self._counts[:, :width].index_select(0, slots)
        repetition, frequency, presence = rates[:, :, None]
        cells = ids + first[:, None]
        flat = logits.view(-1)
        values = flat.take(cells)
        values = self._torch.where(values > 0, values / repetition, values * repetition)
        values -= counts * frequency  # not fused with the product: the same bits as in numpy
        values -= (counts > 0) * presence
        flat.scatter_(0, cells.view(-1), values.view(-1))

    def forget(self) -> None:
        """Trust no copy any more: every row that is met again goes over whole."""
        self._copies.clear()

    def _change(self, row: SequenceRow) -> tuple[Doubles, Doubles, Doubles]:
        history, copy = _history(row), self._copies.get(row)
        width = self._ids.shape[1]
        if copy is not None and row.position == copy.position:
            return np.empty(0), np.empty(0), np.empty(0)
        if copy is not None and row.position == copy.position + 1:
            copy.position = row.position
            columns = np.array([history.last], dtype=np.float64)
            return (
                copy.slot * width + columns,
                history.ids[[history.last]].astype(float),
                history.counts[[history.last]].astype(float),
            )
        if copy is None:
            taken = {other.slot for other in self._copies.values()}
            copy = self._copies[row] = _Copy(next(s for s in range(len(self._ids)) if s not in taken), 0)
        copy.position = row.position
        ids, counts = np.full(width, self._vocab_size, dtype=np.float64), np.zeros(width)
        ids[: len(history)], counts[: len(history)] = history.ids, history.counts
        return copy.slot * width + np.arange(width, dtype=np.float64), ids, counts

    def _make_room(self, slots: int, width: int) -> None:
        """Larger room, empty."""
        new = {"device": self._device}
        self._ids = self._torch.full((slots, width), self._vocab_size, dtype=self._torch.int64, **new)
        self._counts = self._torch.zeros((slots, width), dtype=self._torch.float32, **new)
        self.forget()


def _history(row: SequenceRow) -> TokenHistory:
    assert row.history is not None
    return row.history


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size
