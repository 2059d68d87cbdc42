import logging
import threading

import pytest

from backend.gpu_memory import ASK_EVERY_S, GpuMemory
from engines import DeviceError, DeviceMemoryUse

WAIT_S = 20.0


class Driver:
    """Answers what it was told to, once it is let."""

    def __init__(self) -> None:
        self.answer: DeviceMemoryUse | DeviceError = DeviceMemoryUse(used=3, total=10)
        self.asked = 0
        self.entered = threading.Semaphore(0)
        self.free = threading.Event()
        self.free.set()

    def ask(self) -> DeviceMemoryUse:
        self.asked += 1
        self.entered.release()
        assert self.free.wait(WAIT_S)
        if isinstance(self.answer, DeviceError):
            raise self.answer
        return self.answer


class Page:
    """Reads the page as the replies thread does, on a clock of its own."""

    def __init__(self) -> None:
        self.driver, self.now = Driver(), 100.0
        self.memory = GpuMemory(self.driver.ask, clock=lambda: self.now)

    def read(self) -> dict[str, float]:
        return {reading.name: reading.value for reading in self.memory.readings()}

    def settle(self) -> dict[str, float]:
        """What is told once the question that was asked last is answered."""
        self.read()
        assert self.memory._asking is not None
        self.memory._asking.join(WAIT_S)
        return self.read()


@pytest.fixture
def page() -> Page:
    return Page()


def test_it_tells_what_it_found_and_looks_again_from_time_to_time(page: Page) -> None:
    assert page.settle() == {"gpu_memory_used_bytes": 3.0, "gpu_memory_bytes": 10.0}
    page.driver.answer = DeviceMemoryUse(used=4, total=10)
    page.now += ASK_EVERY_S / 2
    assert page.settle()["gpu_memory_used_bytes"] == 3.0
    page.now += ASK_EVERY_S / 2
    assert page.settle()["gpu_memory_used_bytes"] == 4.0
    assert page.driver.asked == 2


def test_nobody_waits_for_a_driver_that_is_busy_and_nobody_asks_it_twice(page: Page) -> None:
    page.settle()
    page.driver.free.clear()
    try:
        for _ in range(10):
            page.now += ASK_EVERY_S
            assert page.read()["gpu_memory_used_bytes"] == 3.0
        assert all(page.driver.entered.acquire(timeout=WAIT_S) for _ in range(2))
        assert page.driver.asked == 2
    finally:
        page.driver.free.set()


def test_a_gpu_that_is_lost_is_told_once(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    page.settle()
    page.driver.answer = DeviceError("cuda: illegal address")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            page.now += ASK_EVERY_S
            assert page.settle() == {}
    assert caplog.messages == ["how full the GPU is cannot be told: cuda: illegal address"]
    page.driver.answer = DeviceMemoryUse(used=5, total=10)
    page.now += ASK_EVERY_S
    assert page.settle()["gpu_memory_used_bytes"] == 5.0
