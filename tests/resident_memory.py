"""How much memory this process holds, for tests that look for leaks in a process of any size and history."""

import ctypes
import gc
import os
from pathlib import Path


def resident_bytes() -> int:
    """Bytes that something still refers to: what the allocator merely keeps for later is given back.

    Without that the number depends on what ran before, and on which of the allocator's arenas it ran in.
    """
    gc.collect()  # an error and the frames it came through hold each other
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
