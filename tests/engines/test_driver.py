"""The driver probe: what it reads of a GPU, and what it tells a person to install without one."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from engines.driver import HostPinning, require_driver
from engines.errors import DeviceError, DeviceMemoryError


class Driver:
    """Answers as libcuda does, through the pointers it is given; `fails` maps calls to results."""

    def __init__(self, *, devices: int = 2, **fails: int) -> None:
        self.fails = fails
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Callable[..., None]] = {
            "cuInit": lambda flags: None,
            "cuDriverGetVersion": lambda out: self.put(out, ctypes.c_int, 12090),
            "cuDeviceGetCount": lambda out: self.put(out, ctypes.c_int, devices),
            "cuDeviceGet": lambda out, ordinal: self.put(out, ctypes.c_int, ordinal),
            "cuDeviceGetName": lambda out, room, device: setattr(out, "value", b"NVIDIA H200"),
            "cuDeviceTotalMem_v2": lambda out, device: self.put(out, ctypes.c_size_t, 141 << 30),
            "cuDeviceGetAttribute": lambda out, what, device: self.put(
                out, ctypes.c_int, {75: 9, 76: 0}[what]
            ),
            "cuGetErrorString": lambda result, out: self.put(out, ctypes.c_char_p, b"the reason"),
            "cuMemHostRegister_v2": lambda address, nbytes, flags: None,
            "cuMemHostUnregister": lambda address: None,
        }

    @staticmethod
    def put(pointer: Any, kind: Any, value: Any) -> None:
        ctypes.cast(pointer, ctypes.POINTER(kind))[0] = value

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name in self.fails:
                return self.fails[name]
            self.answers[name](*arguments)
            return 0

        return call


def test_a_gpu_is_what_its_driver_says() -> None:
    gpu = require_driver(1, open_library=lambda name: Driver())
    assert (gpu.ordinal, gpu.name, gpu.compute_capability) == (1, "NVIDIA H200", "9.0")
    assert (gpu.driver, gpu.total_bytes) == ("12.9", 141 << 30)


def test_without_a_driver_it_says_what_to_install() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(DeviceError) as caught:
        require_driver(open_library=missing)
    text = str(caught.value)
    assert "\n" not in text
    assert "libcuda.so.1: cannot open shared object file" in text
    assert "install the driver" in text
    assert "`make setup EXTRA=gpu-cu13`" in text
    assert "`tensorcache install --python-deps --extra gpu-cu13`" in text
    assert "(gpu-cu12 for a driver of CUDA 12)" in text
    assert "pip install" not in text, "the name is not ours on a package index"


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (Driver(cuInit=100), r"expected a GPU, found none \(cuInit: the reason \(100\)\).*--gpus all"),
        (Driver(cuInit=803), r"cuInit failed: the reason \(803\)"),
        (Driver(cuInit=999, cuGetErrorString=1), "cuInit failed: error 999"),
        (Driver(devices=0), "one of the 0 GPUs of this machine, found 0"),
        (Driver(cuDeviceTotalMem_v2=3), r"cuDeviceTotalMem_v2 failed: the reason \(3\)"),
    ],
)
def test_what_the_driver_refuses_is_said_in_its_words(driver: Driver, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        require_driver(open_library=lambda name: driver)


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_gpu_that_is_not_there_is_named(ordinal: int) -> None:
    with pytest.raises(DeviceError, match=f"one of the 2 GPUs of this machine, found {ordinal}"):
        require_driver(ordinal, open_library=lambda name: Driver())


def test_pinning_passes_whole_addresses() -> None:
    driver = Driver()
    pinning = HostPinning(open_library=lambda name: driver)
    pinning.register(0x7FFF_0000_1000, 5 << 30)
    pinning.unregister(0x7FFF_0000_1000)
    (name, (address, nbytes, flags)), (undo, (same,)) = driver.calls
    assert (name, undo) == ("cuMemHostRegister_v2", "cuMemHostUnregister")
    assert (address.value, nbytes.value, flags.value) == (0x7FFF_0000_1000, 5 << 30, 0)
    assert same.value == address.value


def test_full_memory_is_told_apart() -> None:
    pinning = HostPinning(open_library=lambda name: Driver(cuMemHostRegister_v2=2))
    with pytest.raises(DeviceMemoryError, match="cuMemHostRegister_v2 failed"):
        pinning.register(4096, 4096)
