"""Stops one thread of another process where it stands, as an engine call that never returns would.

A signal stops whole processes; ptrace stops a single thread. One that is caught while it holds Python's own
lock, or one of the allocator, would stop the others with it: then it is let go and caught again elsewhere.
"""

import contextlib
import ctypes
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ALL_THREADS = 0x40000000  # __WALL
_TRIES = 20
_WATCHED_FOR_S = 1.0


def _ptrace(request: int, tid: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_long
    if call(request, tid, None, None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def thread_of(pid: int, name: str) -> int:
    """The id of the thread that the kernel knows by `name`."""
    (tid,) = [
        int(task.name)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if (task / "comm").read_text().strip() == name
    ]
    return tid


@contextlib.contextmanager
def stopped_thread(pid: int, name: str, *, moving: str) -> Iterator[None]:
    """Inside, the thread `name` stands still while `moving` runs on. Skips where tracing is not permitted."""
    tid, other = thread_of(pid, name), thread_of(pid, moving)
    for _ in range(_TRIES):
        _catch(tid)
        if _moves(pid, other):
            break
        _let_go(tid)
        time.sleep(random.uniform(0.001, 0.03))  # to be elsewhere in its work
    else:
        raise AssertionError(f"{name} was caught {_TRIES} times with a lock that {moving} needs")
    try:
        yield
    finally:
        _let_go(tid)


@contextlib.contextmanager
def stopped_python(pid: int, *names: str) -> Iterator[None]:
    """Inside, the threads `names` and the main thread stand still, as if one of them kept Python's own lock.

    Threads of the server's own code in that process run on.
    """
    caught: list[int] = []
    try:
        for tid in (pid, *(thread_of(pid, name) for name in names)):
            _catch(tid)
            caught.append(tid)
        yield
    finally:
        for tid in reversed(caught):  # of a killed process, the main thread is the last to be gone
            _let_go(tid)


def _catch(tid: int) -> None:
    try:
        _ptrace(_SEIZE, tid)
    except PermissionError as error:
        pytest.skip(f"ptrace is not permitted here: {error}")
    _ptrace(_INTERRUPT, tid)
    os.waitpid(tid, _ALL_THREADS)


def _moves(pid: int, tid: int) -> bool:
    deadline = time.monotonic() + _WATCHED_FOR_S
    before = _switches(pid, tid)
    while time.monotonic() < deadline:
        if _switches(pid, tid) >= before + 2:
            return True
        time.sleep(0.02)
    return False


def _switches(pid: int, tid: int) -> int:
    """How often the thread went to sleep by itself."""
    for line in Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    raise AssertionError(f"thread {tid} has no count of switches")


def _let_go(tid: int) -> None:
    """Continue one that was caught; if its process was killed meanwhile, take note of its end."""
    try:
        _ptrace(_DETACH, tid)
    except ProcessLookupError:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(tid, _ALL_THREADS)
