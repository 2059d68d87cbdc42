"""One server of the cluster: a `tensorcache serve` of its own, with its cache node inside.

Invariants
- It runs in a session of its own: a terminal's Ctrl-C does not reach it, and its parent's death ends it.
- Killed outright, nothing of it gets a chance to say goodbye: supervisor, tritonserver and stubs together.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scripts.cluster.plan import NodePlan
from scripts.environment import inherited
from scripts.errors import TritonError
from scripts.server_process import ServerProcess, children
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import remove_leftovers

LOG = "serve.log"
SERVE = (sys.executable, "-m", "scripts.cli", "serve")
_SERVING = b"gRPC "
"""Only the line that says where it serves has this."""

_STOP_LIMIT_S = 60.0
_GONE_LIMIT_S = 20.0
_LOOK_EVERY_S = 0.05


class NodeServer:
    """The server of one node. It can be started again after it ended."""

    def __init__(self, plan: NodePlan, *, serve: Sequence[str] = SERVE) -> None:
        """`serve`: the command, to which home and ports are added."""
        self.plan = plan
        self.http = TritonHttp(plan.address)
        self._serve = serve
        self._log = plan.home / LOG
        self._log_start = 0
        self._process: ServerProcess | None = None
        self._ending: list[int] = []

    @property
    def grpc_url(self) -> str:
        """Where clients on this machine stream from."""
        return f"{self.plan.address.client_host}:{self.plan.address.grpc_port}"

    @property
    def ended(self) -> str:
        """Empty while it runs; else how it ended, in one line."""
        if self._process is None:
            return "was not started"
        code = self._process.exit_code()
        return "" if code is None else f"ended with {code}: {self._process.log_tail(1)}"

    def start(self) -> None:
        """Begin to serve; `serving` tells when it does."""
        assert self._process is None or self.ended, "it runs"
        address = self.plan.address
        command = [
            *self._serve, "--home", str(self.plan.home), "--host", address.host,
            "--http-port", str(address.http_port), "--grpc-port", str(address.grpc_port),
            "--metrics-port", str(address.metrics_port),
        ]  # fmt: skip
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._process = ServerProcess(command, environment=inherited(), log=self._log)

    def serving(self) -> bool:
        """True once every model gave a token. TritonError if it ended instead."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            if _SERVING in log.read():
                return True
        if reason := self.ended:
            raise TritonError(f"{self.plan.id} {reason} (see {self._log})")
        return False

    def processes(self) -> list[int]:
        """Its supervisor, tritonserver, and what that started, outermost first."""
        return [] if self._process is None or self.ended else _family(self._process.pid)

    def kill(self) -> None:
        """SIGKILL to all of it, at once. The supervisor stands still first: it would start another."""
        process = self._process
        if process is None or self.ended:
            return
        os.kill(process.pid, signal.SIGSTOP)
        family = _family(process.pid)
        for pid in family[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        wait_until_gone(family)
        self._remove_leftovers()

    def ask_to_stop(self) -> None:
        """Begin an orderly end."""
        if self._process is not None:
            self._ending = self.processes()
            self._process.ask_to_stop()

    def stop(self) -> None:
        """Finish what `ask_to_stop` began; by force after a limit. Only the arena stays. Idempotent."""
        process = self._process
        if process is None:
            return
        if process.wait(_STOP_LIMIT_S):
            wait_until_gone(self._ending)  # what was killed may outlive its supervisor for a moment
            self._remove_leftovers()
        else:
            self.kill()

    def _remove_leftovers(self) -> None:
        """What a supervisor that was killed could not: the name of a region begins with its process id."""
        assert self._process is not None
        remove_leftovers(f"tensorcache-{self._process.pid}-")


def _family(pid: int) -> list[int]:
    found = [pid]
    for child in children(pid):
        found += _family(child)
    return found


def wait_until_gone(
    pids: Iterable[int], *, pause: Callable[[float], None] = time.sleep, proc: Path = Path("/proc")
) -> None:
    """Until none of them holds anything any more: reaped, or waiting to be. TritonError if one stays."""
    deadline = time.monotonic() + _GONE_LIMIT_S
    left = list(pids)
    while left := [pid for pid in left if _alive(proc / str(pid))]:
        if time.monotonic() > deadline:
            raise TritonError(f"killed, and still there after {_GONE_LIMIT_S:g} s: processes {left}")
        pause(_LOOK_EVERY_S)


def _alive(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
