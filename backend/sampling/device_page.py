"""A page-locked array and its twin on the device: what a step sends, or gets back, in one copy.

Page-locked memory is what makes a copy asynchronous. The page is written again in the next step only, after
the wait at the end of this one. Threads: one owner.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Torch = Any
Tensor = Any

_ROOM: Final = 4096


class DevicePage:
    """Items of one dtype; grows by doubling."""

    def __init__(self, torch: Torch, dtype: Any, *, device: str) -> None:
        self._torch = torch
        self._dtype = dtype
        self._device = device
        self._make(_ROOM)

    def ship(self, parts: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Copy `parts`, flat, to the device; one flat tensor for each."""
        sizes = [part.size for part in parts]
        count = sum(sizes)
        there = self.room(count)
        np.concatenate([part.ravel() for part in parts], out=self._here[:count])
        there.copy_(self._locked[:count], non_blocking=True)
        return list(there.split(sizes))

    def room(self, count: int) -> Tensor:
        """The first `count` items on the device."""
        if count > len(self._there):
            size = len(self._there)
            while size < count:
                size *= 2
            self._make(size)
        return self._there[:count]

    def fetch(self, count: int) -> npt.NDArray[Any]:
        """Start to copy the first `count` items back: right once the stream was waited for."""
        self._locked[:count].copy_(self._there[:count], non_blocking=True)
        return self._here[:count]

    def _make(self, size: int) -> None:
        pinned = self._device != "cpu"
        self._locked = self._torch.zeros(size, dtype=self._dtype, pin_memory=pinned)
        self._here: npt.NDArray[Any] = self._locked.numpy()
        self._there = self._torch.zeros(size, dtype=self._dtype, device=self._device)
