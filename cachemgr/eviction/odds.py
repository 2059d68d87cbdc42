"""How soon blocks of a class are used again, learned from all of them, and what keeping one is worth.

A life begins when a block is used and ends when it is used again, or unknown when nobody remembers it any
more. Lives that still last count as well (Kaplan and Meier's estimate of survival, 1958): otherwise only the
quick ones would be seen. What a block of some age is worth is the most hits per block and time that it can be
expected to give over any stretch from now (Gittins' index; EVA and LHD rank by much the same).

Age is counted in epochs of capacity/8 uses, so that it means the same to a cache of every size.
"""

from collections.abc import MutableSequence
from typing import cast

import numpy as np
import numpy.typing as npt

from cachemgr.eviction.classes import CLASSES, LEFT_BEHIND

AGES = 256
"""Lives are followed for so many epochs: 32 times the capacity."""

_EDGES = np.array([0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, AGES])
_WIDTHS = np.diff(_EDGES)
_STARTS = _EDGES[:-1]
_LATER = np.triu(np.ones((len(_EDGES), len(_EDGES)), np.bool_), 1)[:-1]
_DOUBT = 12.0
"""So many lives of all classes together stand beside those of one class."""
_HEARD = 32
"""Returns below which the order stays: least seen first, then least recent."""


class Odds:
    """Tables of lives by class and age. `worth[class][age]` is what is learned; the rest is how."""

    def __init__(self) -> None:
        shape = CLASSES, AGES
        self._alive = np.zeros(shape, np.int32)
        self._returned = np.zeros(shape, np.float32)
        self._ended = np.zeros(shape, np.float32)
        self._returns = np.zeros((CLASSES, len(_WIDTHS)))
        self._at_risk = np.zeros((CLASSES, len(_WIDTHS)))
        self._alive_cells = self._alive.reshape(-1).data
        self._returned_cells = cast("MutableSequence[float]", self._returned.reshape(-1).data)
        self._ended_cells = cast("MutableSequence[float]", self._ended.reshape(-1).data)
        self._epoch = 0
        self.learned = False
        """True once `worth` is more than a guess."""
        self._turn = 0
        self._counted = False
        recent = [1.0 / (1 + age) for age in range(AGES)]
        self.worth = [[0.0] * AGES if kind == LEFT_BEHIND else recent for kind in range(CLASSES)]

    def begin(self, kind: int, epoch: int, *, lives: int = 1) -> None:
        """Lives of blocks of this class began in that epoch."""
        self._alive_cells[kind * AGES + epoch % AGES] += lives

    def begin_many(self, kinds: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> None:
        """A life of a block of each class began in each epoch; none is too old to be followed."""
        np.add.at(self._alive, (kinds, epochs % AGES), 1)

    def end(self, kind: int, epoch: int, *, returned: bool) -> None:
        """A life that began in that epoch ended now: the block was used, or its end is not known."""
        age = self._epoch - epoch
        if age < AGES:
            self._alive_cells[kind * AGES + epoch % AGES] -= 1
            cells = self._returned_cells if returned else self._ended_cells
            cells[kind * AGES + age] += 1.0

    def advance(self) -> int:
        """The next epoch begins; its number. Lives that are too old to follow end."""
        self._epoch += 1
        column = self._epoch % AGES
        self._ended[:, AGES - 1] += self._alive[:, column]
        self._alive[:, column] = 0
        if not self._epoch % (2 * AGES):
            self._returned *= 0.5
            self._ended *= 0.5
        return self._epoch

    def learn(self) -> None:
        """A step towards what each class is worth now: two for a class, in turn. About 50 µs each."""
        if self._counted:
            if self.learned:
                self.worth[self._turn] = np.repeat(_index(self._hazard(self._turn)), _WIDTHS).tolist()
        else:
            self._turn = (self._turn + 1) % CLASSES
            self._count(self._turn)
        self._counted = not self._counted

    def _count(self, kind: int) -> None:
        """Bring the lives of one class together by stretches of ages."""
        now = self._epoch % AGES
        alive = self._alive[kind]
        by_age = np.concatenate((alive[now::-1], alive[:now:-1]))
        returns = np.add.reduceat(self._returned[kind], _STARTS).astype(np.float64)
        lives = returns + np.add.reduceat(self._ended[kind] + by_age, _STARTS)
        self._returns[kind] = returns
        self._at_risk[kind] = np.cumsum(lives[::-1])[::-1] - 0.5 * lives
        self.learned = self.learned or bool(self._returns.sum() >= _HEARD)

    def _hazard(self, kind: int) -> npt.NDArray[np.float64]:
        """The probability of a return within each stretch of ages, where few lives were seen: as of all."""
        of_all = self._returns.sum(0) / np.maximum(self._at_risk.sum(0), 1.0)
        returns, at_risk = self._returns[kind], self._at_risk[kind]
        factor = (returns.sum() + 1.0) / (float((at_risk * of_all).sum()) + 1.0)
        hazard: npt.NDArray[np.float64] = (returns + _DOUBT * factor * of_all) / (at_risk + _DOUBT)
        return hazard.clip(max=0.95)


def _index(hazard: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each stretch of ages: the most returns per epoch that keeping on from its start can give."""
    alive = np.concatenate(([1.0], np.cumprod(1.0 - hazard)))
    kept = np.concatenate(([0.0], np.cumsum(_WIDTHS * (alive[:-1] + alive[1:]) / 2)))
    gains = alive[:-1, None] - alive[None, :]
    costs = kept[None, :] - kept[:-1, None]
    rates: npt.NDArray[np.float64] = np.divide(gains, costs, out=np.zeros_like(gains), where=_LATER)
    best: npt.NDArray[np.float64] = rates.max(1)
    return best
