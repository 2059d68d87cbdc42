"""Page-locking in the background: whole slots and pages at a time, undone in time, harmless when it fails."""

import itertools
import logging
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import NoPageLocker, open_page_locker
from engines.errors import DeviceError, DeviceMemoryError
from engines.page_locking import Bytes, DevicePageLocker, slices

PAGE = mmap.PAGESIZE
BIG = 40 << 20  # a slot of which a slice takes one


def arena(slots: int, slot_nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, slots * slot_nbytes), np.uint8).reshape(slots, slot_nbytes)


class Device:
    """Knows on which threads its context is current."""

    def __init__(self) -> None:
        self.current_on: list[str] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        self.current_on.append(threading.current_thread().name)
        try:
            yield
        finally:
            self.current_on.remove(threading.current_thread().name)


class Pinning:
    """Keeps what is pinned; can be told to fail, and to wait inside a call."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pinned: dict[int, int] = {}
        self.most = 1 << 62
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.changed = threading.Condition()

    def register(self, address: int, nbytes: int) -> None:
        assert threading.current_thread().name in self.device.current_on, "no context on this thread"
        self.inside.set()
        assert self.go_on.wait(10)
        if sum(self.pinned.values()) + nbytes > self.most:
            raise DeviceMemoryError("driver: cuMemHostRegister_v2 failed: out of memory (2)")
        with self.changed:
            self.pinned[address] = nbytes
            self.changed.notify_all()

    def unregister(self, address: int) -> None:
        assert threading.current_thread().name in self.device.current_on, "no context on this thread"
        del self.pinned[address]

    def wait_for(self, nbytes: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: sum(self.pinned.values()) == nbytes, 10), self.pinned


@pytest.fixture
def pinning() -> Pinning:
    return Pinning(Device())


@pytest.fixture
def locker(pinning: Pinning) -> Iterator[DevicePageLocker]:
    locker = DevicePageLocker(pinning.device, pinning)  # type: ignore[arg-type]
    yield locker
    pinning.go_on.set()
    locker.close()
    assert pinning.pinned == {}
    assert "page-locker" not in {thread.name for thread in threading.enumerate()}


def test_all_of_it_is_pinned_and_unpinned(locker: DevicePageLocker, pinning: Pinning) -> None:
    one, two = arena(3, BIG), arena(7, 640)
    locker.lock(one)
    locker.lock(two)
    locker.lock(one)  # once is enough
    pinning.wait_for(one.nbytes + two.nbytes)
    locker.unlock(two)
    locker.unlock(arena(1, PAGE))  # never locked
    assert sum(pinning.pinned.values()) == one.nbytes


def test_unlock_stops_what_is_under_way(locker: DevicePageLocker, pinning: Pinning) -> None:
    memory = arena(3, BIG)
    pinning.go_on.clear()
    locker.lock(memory)
    assert pinning.inside.wait(10)
    unlocking = threading.Thread(target=locker.unlock, args=(memory,))
    unlocking.start()
    unlocking.join(0.05)
    assert unlocking.is_alive(), "it did not wait for the slice that is being pinned"
    pinning.go_on.set()
    unlocking.join(10)
    assert not unlocking.is_alive()
    assert pinning.pinned == {}
    last = arena(1, PAGE)
    locker.lock(last)
    pinning.wait_for(PAGE)  # the thread is past `memory`


def test_a_failure_is_one_line_and_keeps_the_rest(
    locker: DevicePageLocker, pinning: Pinning, caplog: pytest.LogCaptureFixture
) -> None:
    pinning.most = BIG + PAGE
    locker.lock(arena(3, BIG))
    locker.lock(arena(1, PAGE))
    pinning.wait_for(BIG + PAGE)
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"pinned={BIG} of {3 * BIG} bytes" in line.getMessage()
    assert "--ulimit memlock=-1" in line.getMessage()


def test_after_close_nothing_is_pinned_any_more(pinning: Pinning) -> None:
    locker = DevicePageLocker(pinning.device, pinning)  # type: ignore[arg-type]
    locker.close()
    locker.lock(arena(1, PAGE))
    locker.close()
    assert not pinning.inside.is_set()


def test_a_failed_unpin_is_said(
    locker: DevicePageLocker,
    pinning: Pinning,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(address: int) -> None:
        raise DeviceError("driver: the device is lost")

    memory = arena(1, PAGE)
    locker.lock(memory)
    pinning.wait_for(PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(pinning, "unregister", lost)
        locker.unlock(memory)
    pinning.pinned.clear()
    assert "left page-locked: driver: the device is lost" in caplog.text


@given(st.integers(1, 400), st.integers(1, 60_000), st.sampled_from([0, 1, 64]))
def test_slices_hold_whole_slots_and_begin_on_pages(slots: int, units: int, off: int) -> None:
    address, slot_nbytes = (1 << 40) + off, 128 * units
    found = slices(address, slots, slot_nbytes)
    assert found[0][0] == address
    for (start, nbytes), (following, _) in itertools.pairwise(found):
        assert start + nbytes == following
        assert following % PAGE == 0
    assert sum(nbytes for _, nbytes in found) == slots * slot_nbytes
    assert all(nbytes % slot_nbytes == 0 for _, nbytes in found)
    assert len(found) == 1 or max(nbytes for _, nbytes in found) <= max(64 << 20, 32 * slot_nbytes)


def test_engines_that_copy_with_the_cpu_need_none() -> None:
    locker = open_page_locker("onnxruntime", device=0)
    assert isinstance(locker, NoPageLocker)
    locker.lock(arena(1, PAGE))
    locker.unlock(arena(1, PAGE))
    locker.close()
