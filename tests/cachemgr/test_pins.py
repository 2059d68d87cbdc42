"""Who pins memory for a GPU hears of every arena, of what blocks are restored through, and of their end."""

import os

import numpy as np
import numpy.typing as npt
import pytest

import cachemgr.cache
from cachemgr import open_cache
from cachemgr.shard import slot_nbytes
from tests.cachemgr.host import FORMAT, SECRETS, Host, chain, fill, read

STRIDE = slot_nbytes(FORMAT.payload_nbytes)


class Pins:
    """Keeps what is pinned by its address, as a driver does: twice the same is an error there."""

    def __init__(self) -> None:
        self.pinned: dict[int, npt.NDArray[np.uint8]] = {}
        self.closed = False
        self.said: list[str] = []

    def lock(self, memory: npt.NDArray[np.uint8]) -> None:
        self.said.append("lock")
        assert memory.ndim == 2
        assert memory.flags.c_contiguous
        assert memory.ctypes.data % 4096 == 0
        assert self.pinned.setdefault(memory.ctypes.data, memory) is memory

    def unlock(self, memory: npt.NDArray[np.uint8]) -> None:
        self.said.append("unlock")
        del self.pinned[memory.ctypes.data]

    def close(self) -> None:
        self.closed = True
        self.pinned.clear()

    def covers(self, block: npt.NDArray[np.uint8]) -> bool:
        start = block.ctypes.data
        return any(
            first <= start and start + block.nbytes <= first + memory.nbytes
            for first, memory in self.pinned.items()
        )


def test_every_payload_that_is_written_or_handed_over_lies_in_pinned_memory(host: Host) -> None:
    pins = Pins()
    cache = open_cache(FORMAT, host.settings(blocks=12), SECRETS, clock=host.clock, pins=pins)
    hashes = chain(cache, 9)
    pending = cache.prepare(hashes, 0)
    assert pending is not None
    assert pins.covers(pending.payload)
    cache.abort(pending)
    del pending
    assert fill(cache, hashes) == 9
    lease = cache.acquire(hashes, deadline=None)
    handed: list[bool] = []
    cache.restore(lease, first=0, sink=lambda _, payloads: handed.extend(map(pins.covers, payloads)))
    lease.release()
    assert handed == [True] * 9
    assert sum(memory.shape == (12, STRIDE) for memory in pins.pinned.values()) == 1
    cache.close()
    assert pins.closed
    assert not pins.pinned


def test_a_lost_arena_is_let_go_before_its_successor_is_pinned(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 3600.0)
    pins = Pins()
    cache = open_cache(FORMAT, host.settings(blocks=12), SECRETS, clock=host.clock, pins=pins)
    os.unlink(host.arenas()[0])
    cache._refresh_arenas()
    assert pins.said == ["lock", "unlock", "lock"]
    assert len(pins.pinned) == 1
    hashes = chain(cache, 9)
    assert fill(cache, hashes) == read(cache, hashes) == 9
    cache.close()
