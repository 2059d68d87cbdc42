"""How much memory this process may still take: a release too big for it is refused before it is read.

What was freed is not back in the system by itself: the C library keeps it in the arena of the thread that
took it, in pieces between what is still in use. After a load that is hundreds of megabytes.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

from engines.errors import ReleaseError

AvailableMemory = Callable[[], int]
"""Bytes that can be allocated now without swapping or being killed."""


def available_bytes(root: Path = Path("/")) -> int:
    """The smaller of the machine's available memory and what is left below this process's cgroup limits."""
    left = [_machine_bytes(root)]
    left.extend(_cgroup_bytes(root))
    return max(0, min(left))


def require_memory(need: int, *, purpose: str, available: AvailableMemory) -> None:
    """Refuse with ReleaseError (step "memory") if `need` bytes are more than the host has left."""
    have = available()
    if need > have:
        raise ReleaseError(
            "memory", expected=f"{need} bytes of free host memory to {purpose}", found=f"{have} bytes"
        )


def give_back_freed_memory() -> None:
    """Hand what this process freed back to the system: after something large was closed.

    Takes tens of milliseconds, with Python's lock free; a thread that allocates may wait for a part of them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # a C library other than glibc keeps less
        trim(0)


def _machine_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ReleaseError("memory", expected="MemAvailable in /proc/meminfo", found="no such line")


def _cgroup_bytes(root: Path) -> list[int]:
    """Room left in each memory cgroup from this process's own up to the root: each may have a limit."""
    left = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # Inside a container the path may name a folder of the host that is not mounted here: the mount's own
        # root is then this process's cgroup, and it is always among the candidates.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(mount, *parts[:depth])
            bound, used = _number(folder / limit), _number(folder / usage)
            if bound is not None and used is not None:
                left.append(bound - used + _reclaimable(folder / "memory.stat", cache))
    return left


def _reclaimable(stat: Path, key: str) -> int:
    """Page cache that the kernel drops before it kills anyone."""
    for line in _lines(stat):
        if line.startswith(key + " "):
            return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # "max": no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not this kind of cgroup, or none at all: it sets no limit
        return []
