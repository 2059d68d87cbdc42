"""The GPU as engines use it: its context, memory, one stream of copies and kernels, and waits for them.

The context is the device's primary one, which TensorRT and torch share. A context is current on one thread
at a time per push, so every piece of work stands in `with device.current():`, on whichever thread it runs;
freeing memory is such work too. Errors of the driver leave that block as DeviceError.

Invariants
- One `Device` per GPU and process: memory allocated for one engine may be freed by its successor.
- Nothing runs on the default stream, which would wait for, and stop, everybody else's work.

Threads: any, inside `current()`. Waits for the GPU have no deadline of their own: the driver offers none,
so whoever watches the process must have one.
"""

import atexit
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.driver import GPU_EXTRAS, GpuInfo, require_driver
from engines.errors import DeviceError, DeviceMemoryError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, which pycuda has no name for: never waits for the default stream


_OPENING = threading.Lock()  # two threads at once would make two devices of one GPU


def open_device(ordinal: int) -> "Device":
    """The GPU `ordinal`, its primary context retained until the process ends. DeviceError."""
    with _OPENING:
        return _opened_device(ordinal)


@functools.cache
def _opened_device(ordinal: int) -> "Device":
    info = require_driver(ordinal)
    try:
        import pycuda.driver
    except ImportError as error:
        raise DeviceError(
            f"pycuda: expected its Python package, found none ({error}): {GPU_EXTRAS}"
        ) from error
    return Device(pycuda.driver, info)


class Device:
    """One GPU through its primary context. Make it with `open_device`."""

    def __init__(self, cuda: Any, info: GpuInfo) -> None:
        self.info = info
        self._cuda = cuda
        with _translated(cuda):
            cuda.init()
            self._context = cuda.Device(info.ordinal).retain_primary_context()
        # pycuda's own destructor, which knows no primary context, would complain on stderr at the end
        atexit.register(self._context.detach)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread for the block, where driver errors are DeviceErrors."""
        with _translated(self._cuda):
            self._context.push()
            try:
                yield
            finally:
                self._cuda.Context.pop()

    def is_lost(self, stream: "Stream") -> bool:
        """After a failure: is this process done with the GPU? `stream` is any of its streams.

        The driver repeats what broke asynchronously at every later call; what it merely refused, it forgets.
        """
        try:
            with self.current():
                stream.synchronise()
        except DeviceError:
            return True
        return False

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, whoever uses them."""
        free, total = self._cuda.mem_get_info()
        return int(free), int(total)

    def stream(self) -> "Stream":
        """A new stream; its owner closes it."""
        return Stream(self._cuda)

    def allocate(self, nbytes: int) -> "DeviceMemory":
        """Uninitialised device memory, aligned to 256 bytes. DeviceMemoryError."""
        return DeviceMemory(self._cuda.mem_alloc(nbytes), nbytes)

    def allocate_zeroed(self, nbytes: int, stream: "Stream") -> "DeviceMemory":
        """Device memory that is zero for all that comes in `stream` after this. DeviceMemoryError."""
        memory = self.allocate(nbytes)
        try:
            stream.zero(memory.address, nbytes)
        except BaseException:
            memory.free()
            raise
        return memory

    def page_locked(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> "PageLockedArray":
        """Zeroed host memory that the GPU copies from and to without a detour. DeviceMemoryError."""
        array = self._cuda.pagelocked_empty(shape, np.dtype(dtype))
        array.fill(0)
        return PageLockedArray(array)


class DeviceMemory:
    """One allocation on the device. Its owner frees it: nothing else does so at a known time."""

    def __init__(self, allocation: Any, nbytes: int) -> None:
        self._allocation = allocation
        self.address = int(allocation)
        self.nbytes = nbytes

    def free(self) -> None:
        """Give it back, inside `current()`. Idempotent."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            allocation.free()


class PageLockedArray:
    """A numpy array in page-locked memory; after `free` no view of it may be touched."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array: npt.NDArray[Any] | None = array

    @property
    def array(self) -> npt.NDArray[Any]:
        """The memory."""
        assert self._array is not None, "page-locked memory after free"
        return self._array

    def free(self) -> None:
        """Give it back, inside `current()`. Idempotent."""
        array, self._array = self._array, None
        if array is not None:
            allocation: Any = array.base
            allocation.free()


@dataclass(frozen=True, slots=True)
class Box:
    """A strided copy: `depth` slices of `rows` rows of `width` bytes.

    On the device a row begins `device_pitch` bytes after the one before, a slice `device_rows` rows after
    the one before. On the host rows and slices follow one another without gaps.
    """

    width: int
    rows: int
    depth: int
    device_pitch: int
    device_rows: int


class Stream:
    """Work in order: copies here, kernels of whoever is given `handle`."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.driver_stream = cuda.Stream(_NON_BLOCKING)
        self.handle = int(self.driver_stream.handle)

    def close(self) -> None:
        """Let go of it, inside `current()`, after the work in it is done. Idempotent."""
        self.driver_stream = None

    def synchronise(self) -> None:
        """Wait until everything issued so far is done."""
        self.driver_stream.synchronize()

    def zero(self, address: int, nbytes: int) -> None:
        """Fill device memory with zero bytes."""
        self._cuda.memset_d8_async(address, 0, nbytes, self.driver_stream)

    def upload(self, address: int, source: npt.NDArray[Any]) -> None:
        """Copy a contiguous array to the device; it must stay unchanged until that is done."""
        self._cuda.memcpy_htod_async(address, source, self.driver_stream)

    def download(self, target: npt.NDArray[Any], address: int) -> None:
        """Copy from the device into a contiguous array."""
        self._cuda.memcpy_dtoh_async(target, address, self.driver_stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device."""
        self._cuda.memcpy_dtod_async(target, source, nbytes, self.driver_stream)

    def upload_box(self, address: int, source: npt.NDArray[Any], box: Box) -> None:
        """Copy contiguous host bytes into strided device memory from `address`."""
        copy = self._box_copy(box)
        copy.set_src_host(source)
        copy.src_pitch, copy.src_height = box.width, box.rows
        copy.set_dst_device(address)
        copy.dst_pitch, copy.dst_height = box.device_pitch, box.device_rows
        copy(self.driver_stream)

    def download_box(self, target: npt.NDArray[Any], address: int, box: Box) -> None:
        """Copy strided device memory from `address` into contiguous host bytes."""
        copy = self._box_copy(box)
        copy.set_src_device(address)
        copy.src_pitch, copy.src_height = box.device_pitch, box.device_rows
        copy.set_dst_host(target)
        copy.dst_pitch, copy.dst_height = box.width, box.rows
        copy(self.driver_stream)

    def event(self) -> "Event":
        """A mark in this stream, to be waited for."""
        return Event(self._cuda, self)

    def _box_copy(self, box: Box) -> Any:
        copy = self._cuda.Memcpy3D()
        copy.width_in_bytes, copy.height, copy.depth = box.width, box.rows, box.depth
        return copy


class Event:
    """Marks a place in a stream again and again, and waits for the last mark."""

    def __init__(self, cuda: Any, stream: Stream) -> None:
        self._event = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._stream = stream

    def record(self) -> None:
        """Mark: everything issued before this."""
        self._event.record(self._stream.driver_stream)

    def close(self) -> None:
        """Let go of it, inside `current()`. Idempotent."""
        self._event = None

    def wait(self) -> None:
        """Until the last mark is reached; at once where there is none."""
        self._event.synchronize()


@contextmanager
def _translated(cuda: Any) -> Iterator[None]:
    try:
        yield
    except cuda.MemoryError as error:
        raise DeviceMemoryError(f"cuda: {str(error).strip()}") from error
    except cuda.Error as error:
        raise DeviceError(f"cuda: {str(error).strip()}") from error
