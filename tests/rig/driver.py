"""The stand-in libcuda as tests see it: what is allocated, what was called, and which call shall fail.

The library is loaded with global symbols before pycuda is imported, so that its name (libcuda.so.1) satisfies
pycuda, cuda-bindings and ctypes alike. It stays in the process; `StandIn.unplug` leaves it without a GPU.
"""

import ctypes
import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
NO_DEVICE, OUT_OF_MEMORY, LAUNCH_FAILED = 100, 2, 719


class _Memory(enum.IntEnum):
    """Indices of rig_memory in memory.c."""

    DEVICE_BYTES = 0
    DEVICE_ALLOCATIONS = 1
    DEVICE_PEAK = 2
    PAGE_LOCKED_BYTES = 3
    REGISTERED_BYTES = 4
    ORPHANS = 5
    PAGEABLE_COPIES = 6


class _Live(enum.IntEnum):
    """Indices of rig_live in streams.c."""

    STREAMS = 0
    EVENTS = 1
    GRAPHS = 2
    GRAPH_EXECS = 3
    GRAPH_LAUNCHES = 4


@dataclass(frozen=True, slots=True)
class Held:
    """What lives in the driver: bytes, and numbers of objects."""

    device_bytes: int
    device_allocations: int
    page_locked_bytes: int
    registered_bytes: int
    streams: int
    events: int
    graphs: int
    graph_execs: int


class StandIn:
    """One per process (see plugin.py)."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name, result in (
            ("rig_memory", ctypes.c_size_t), ("rig_room", ctypes.c_size_t), ("rig_calls", ctypes.c_long),
            ("rig_live", ctypes.c_long), ("rig_pending", ctypes.c_uint64),
            ("rig_take_released", ctypes.c_size_t),
        ):  # fmt: skip
            getattr(self._library, name).restype = result
        self._kernels: dict[int, Callable[[], None]] = {}
        self._ids = itertools.count(1)
        self._released = (ctypes.c_uint64 * 1024)()
        self._runner = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(self._run)
        self._library.rig_set_runner(self._runner)
        self.failures: list[BaseException] = []  # raised by kernels while they ran
        self.plugged = True

    def plug(
        self, *, devices: int = 1, capability: tuple[int, int] = (8, 0), name: str = "Stand-in GPU",
        total: int = 2 * GIB,
    ) -> None:  # fmt: skip
        """The machine has these GPUs from now on."""
        self.plugged = devices > 0
        self._library.rig_set_device(devices, *capability, name.encode(), ctypes.c_size_t(total))

    def unplug(self) -> None:
        """A driver that finds no GPU."""
        self.plug(devices=0)

    @property
    def held(self) -> Held:
        memory, live = self._library.rig_memory, self._library.rig_live
        return Held(
            device_bytes=memory(_Memory.DEVICE_BYTES),
            device_allocations=memory(_Memory.DEVICE_ALLOCATIONS),
            page_locked_bytes=memory(_Memory.PAGE_LOCKED_BYTES),
            registered_bytes=memory(_Memory.REGISTERED_BYTES),
            streams=live(_Live.STREAMS),
            events=live(_Live.EVENTS),
            graphs=live(_Live.GRAPHS),
            graph_execs=live(_Live.GRAPH_EXECS),
        )

    @property
    def peak_bytes(self) -> int:
        """Most device bytes at one time since `restart_peak`."""
        return int(self._library.rig_memory(_Memory.DEVICE_PEAK))

    def restart_peak(self) -> None:
        self._library.rig_restart_peak()

    @property
    def pageable_copies(self) -> int:
        """Asynchronous copies from or to memory that is not page-locked: they work, but they wait."""
        return int(self._library.rig_memory(_Memory.PAGEABLE_COPIES))

    @property
    def graph_launches(self) -> int:
        return int(self._library.rig_live(_Live.GRAPH_LAUNCHES))

    @property
    def pending(self) -> int:
        """Operations in queues that nobody waited for yet."""
        return int(self._library.rig_pending())

    @property
    def context_depth(self) -> int:
        """Contexts pushed on the calling thread."""
        return int(self._library.rig_context_depth())

    @property
    def current_device(self) -> int | None:
        """The device whose context is current on the calling thread."""
        device = int(self._library.rig_current_device())
        return None if device < 0 else device

    def calls(self, name: str = "*") -> int:
        """How often a driver call was made, by its documented name (cuMemAlloc, not cuMemAlloc_v2)."""
        return int(self._library.rig_calls(name.encode()))

    def room(self, address: int) -> int:
        """Bytes from `address` to the end of the device allocation it lies in; 0 if in none."""
        return int(self._library.rig_room(ctypes.c_size_t(address)))

    def fail(self, name: str, *, nth: int = 1, times: int = 1, result: int = OUT_OF_MEMORY) -> None:
        """The nth call from now of `name`, and `times` − 1 after it, fail.

        "*" is any call, "enqueue" a step of the double. When memory runs out, pycuda collects garbage and
        tries again: such a failure must come twice to be seen.
        """
        self._library.rig_fail(name.encode(), ctypes.c_long(nth), ctypes.c_long(times), result)

    def forget_failures(self) -> int:
        """Cancel what `fail` asked for and has not come; how many there were."""
        return int(self._library.rig_forget_failures())

    def forgive(self) -> int:
        """Clear an asynchronous error, which a real device would keep; its number."""
        self.failures.clear()
        return int(self._library.rig_forgive())

    def complain(self, text: str) -> None:
        """Add to the complaints."""
        self._library.rig_complain(text.encode())

    def take_complaints(self) -> list[str]:
        """What callers did wrong since the last call; a test that provokes it takes it, or fails."""
        text = ctypes.create_string_buffer(16384)
        self._library.rig_take_complaints(text, ctypes.c_size_t(len(text)))
        return text.value.decode(errors="replace").splitlines()

    def allocate(self, nbytes: int) -> int | None:
        """Device memory as a library takes it, in the current context; None if there is no room."""
        address = ctypes.c_size_t()
        failed = self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        return None if failed else address.value

    def release(self, address: int) -> None:
        """Free what `allocate` gave, as a library does that looks after its context itself."""
        self._library.rig_release(ctypes.c_size_t(address))

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being recorded from the stream."""
        return bool(self._library.rig_is_capturing(ctypes.c_void_p(stream)))

    def launch(self, stream: int, kernel: Callable[[], None]) -> int:
        """Queue a kernel on a stream (or into the graph that it captures); the driver's result."""
        self._forget_released()
        number = next(self._ids)
        self._kernels[number] = kernel
        result = int(self._library.rig_launch(ctypes.c_void_p(stream), ctypes.c_uint64(number)))
        if result:
            self._kernels.pop(number, None)
        return result

    def _run(self, number: int) -> int:
        try:
            self._kernels[number]()
        except BaseException as error:  # the caller is C; the device fails and the test sees why
            self.failures.append(error)
            self.complain(f"a kernel failed: {type(error).__name__}: {error}")
            return 1
        return 0

    def _forget_released(self) -> None:
        while count := self._library.rig_take_released(self._released, ctypes.c_size_t(len(self._released))):
            for number in self._released[:count]:
                self._kernels.pop(number, None)
