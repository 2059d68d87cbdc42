"""One running tritonserver: started in a process group of its own, watched, and stopped without a trace.

Invariants
- The group is ours alone, so stopping it never reaches a process somebody else started.
- A terminal's Ctrl-C does not reach Triton: its supervisor stops it in order.
- If the supervisor dies, the kernel sends Triton SIGTERM.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.triton_runtime import STUB

_PR_SET_PDEATHSIG = 1
_ROUTINE = re.compile(r"[IW]\d{4} |I 20|[|+]|E\d{4} .*CudaDriverHelper")
"""Log lines that say nothing about an end: information, warnings, tables, and a host without a GPU."""


def _die_with_parent() -> Callable[[], None]:
    """What the child runs before exec: one call; what it needs is looked up before the fork."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_for_sigterm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

    return ask_for_sigterm


@dataclass(frozen=True, slots=True)
class StubProcess:
    """A living process of Triton's Python backend and the model it serves. `started`: later is larger."""

    pid: int
    model: str
    started: int = 0


class ServerProcess:
    """A tritonserver and its stubs."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as sink:
            self._log_start = sink.tell()
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,  # a trace that its operator turns on holds prompts
                preexec_fn=_die_with_parent(),
            )

    @property
    def pid(self) -> int:
        """Process id of tritonserver, also the id of its process group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stubs(self) -> list[StubProcess]:
        """The living stubs, read from /proc; ones that died and were not reaped do not count."""
        return living_stubs(self.pid)

    def kill_stub(self, stub: StubProcess) -> None:
        """End one of `stubs`, if it is still there."""
        if stub in self.stubs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)

    def ask_to_stop(self) -> None:
        """SIGTERM: finish what runs, unload, exit."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, limit_s: float) -> bool:
        """True if it ended within the limit."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to the whole group, stubs included, and reap."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self, lines: int = 8) -> str:
        """Why it ended, from its own log: the last lines that are neither routine nor a table."""
        with self._log.open("rb") as source:
            source.seek(self._log_start)
            text = source.read().decode("utf-8", "replace").splitlines()
        reasons = [line for line in text if line.strip() and not _ROUTINE.match(line)]
        return "\n".join((reasons or text)[-lines:])


def living_stubs(server_pid: int) -> list[StubProcess]:
    """The stubs of a tritonserver by its process id."""
    return [stub for pid in children(server_pid) if (stub := _stub(pid)) is not None]


def children(pid: int) -> list[int]:
    """Process ids of the direct children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def _stub(pid: int) -> StubProcess | None:
    """Argv of a stub: program, <repository>/<model>/<version>/model.py, shared-memory region, …"""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        started = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return None
    if len(words) < 3 or not words[0].endswith(STUB.encode()):
        return None
    model = Path(words[1].decode("utf-8", "replace")).parent.parent.name
    return StubProcess(pid=pid, model=model, started=started)
