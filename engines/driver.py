"""Asks NVIDIA's driver whether there is a GPU and which, before any GPU library is loaded.

TensorRT without a driver hands out a Runtime whose next use ends the process, and pycuda cannot even be
imported: so this asks first, through ctypes, and needs nothing but the driver's own library. It also holds
the two calls that pin memory, because pycuda's keep the interpreter lock meanwhile.

Threads: any.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.errors import DeviceError, DeviceMemoryError

LIBRARY = "libcuda.so.1"
GPU_EXTRAS = (
    "install the extra gpu-cu13 (gpu-cu12 for a driver of CUDA 12): `make setup EXTRA=gpu-cu13`, or beside a "
    "deployed backend `tensorcache install --python-deps --extra gpu-cu13`"
)

_SUCCESS, _OUT_OF_MEMORY, _NO_DEVICE = 0, 2, 100
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NAME_BYTES = 256

OpenLibrary = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU as its driver tells it. `driver` is the newest CUDA that the driver runs, such as "13.0"."""

    ordinal: int
    name: str
    compute_capability: str
    driver: str
    total_bytes: int


def require_driver(ordinal: int = 0, *, open_library: OpenLibrary = ctypes.CDLL) -> GpuInfo:
    """The GPU `ordinal`; DeviceError says what is missing: the driver, a GPU, or this one."""
    library = _Library(open_library)
    library.call("cuInit", 0)
    count, version = ctypes.c_int(), ctypes.c_int()
    library.call("cuDriverGetVersion", ctypes.byref(version))
    library.call("cuDeviceGetCount", ctypes.byref(count))
    if not 0 <= ordinal < count.value:
        raise DeviceError(f"device: expected one of the {count.value} GPUs of this machine, found {ordinal}")
    device, total, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_BYTES)
    library.call("cuDeviceGet", ctypes.byref(device), ordinal)
    library.call("cuDeviceGetName", name, _NAME_BYTES, device)
    library.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    major = library.attribute(_CAPABILITY_MAJOR, device)
    minor = library.attribute(_CAPABILITY_MINOR, device)
    return GpuInfo(
        ordinal=ordinal,
        name=name.value.decode(),
        compute_capability=f"{major}.{minor}",
        driver=f"{version.value // 1000}.{version.value % 1000 // 10}",
        total_bytes=total.value,
    )


class HostPinning:
    """Page-locks memory that is there already, in the context that is current on the calling thread.

    The interpreter lock is free meanwhile: pinning touches every page.
    """

    def __init__(self, *, open_library: OpenLibrary = ctypes.CDLL) -> None:
        self._library = _Library(open_library)

    def register(self, address: int, nbytes: int) -> None:
        """Pin `nbytes` from `address`. DeviceError, DeviceMemoryError."""
        self._library.call(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0)
        )

    def unregister(self, address: int) -> None:
        """Undo `register` of the same address. DeviceError."""
        self._library.call("cuMemHostUnregister", ctypes.c_void_p(address))


class _Library:
    """Calls by name; a result other than success becomes an error with the driver's own words."""

    def __init__(self, open_library: OpenLibrary) -> None:
        try:
            self._library = open_library(LIBRARY)
        except OSError as error:
            raise DeviceError(
                f"driver: expected NVIDIA's driver library {LIBRARY}, found none ({error}): install the "
                f"driver on this machine (in a container: run it with --gpus all), then {GPU_EXTRAS}"
            ) from error

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result == _SUCCESS:
            return
        if result == _NO_DEVICE:
            raise DeviceError(
                f"driver: expected a GPU, found none ({name}: {self._words(result)}): give this machine or "
                "container one (--gpus all, and CUDA_VISIBLE_DEVICES not empty)"
            )
        kind = DeviceMemoryError if result == _OUT_OF_MEMORY else DeviceError
        raise kind(f"driver: {name} failed: {self._words(result)}")

    def attribute(self, attribute: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def _words(self, result: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorString(result, ctypes.byref(text)) == _SUCCESS and text.value
        return f"{known.decode()} ({result})" if known else f"error {result}"
