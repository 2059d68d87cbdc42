"""What a supervisor needs: its times, a server, Triton over the wire, and the outside world."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import msgspec

from scripts.server_process import StubProcess
from scripts.triton_http import ProbeResult


class SupervisorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times in seconds. `patience`: bad probes in a row that make a model dead; they follow sooner.

    `pause_limit_s`: the longest pause before something that died again and again is brought back once more.
    """

    ready_limit_s: float = 300.0
    tick_s: float = 0.5
    probe_every_s: float = 5.0
    doubt_every_s: float = 1.0
    probe_limit_s: float = 2.0
    first_probe_limit_s: float = 30.0
    patience: int = 3
    stop_limit_s: float = 20.0
    linger_s: float = 600.0
    restarts: int = 5
    pause_limit_s: float = 30.0


class Server(Protocol):
    """What the supervisor needs of a running tritonserver."""

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...

    def stubs(self) -> list[StubProcess]:
        """The living processes behind the models."""
        ...

    def kill_stub(self, stub: StubProcess) -> None:
        """End the process behind one model."""
        ...

    def ask_to_stop(self) -> None:
        """Begin an orderly end."""
        ...

    def wait(self, limit_s: float) -> bool:
        """True if it ended within the limit."""
        ...

    def kill(self) -> None:
        """End it and everything it started."""
        ...

    def log_tail(self) -> str:
        """The last lines of its log that explain an end."""
        ...


class Control(Protocol):
    """What the supervisor asks Triton over the wire."""

    def server_ready(self) -> bool:
        """Every named model is loaded."""
        ...

    def repository_index(self) -> dict[str, tuple[str, str]]:
        """State and reason by model."""
        ...

    def facade_target(self, model: str) -> str | None:
        """The decoder behind a facade; None for a decoder."""
        ...

    def load(self, model: str) -> None:
        """Load, or raise TritonError."""
        ...

    def unload(self, model: str) -> None:
        """Unload, or raise TritonError."""
        ...

    def metrics(self) -> str:
        """The metrics page."""
        ...

    def probe(self, model: str, *, limit_s: float) -> ProbeResult:
        """Ask for one token."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The outside world, injected: time, sleep, where one line per event goes.

    `pause` may raise to stop the supervisor; within `hold` nothing does, so that processes are started whole.
    """

    clock: Callable[[], float]
    pause: Callable[[float], None]
    report: Callable[[str], None]
    hold: Callable[[], AbstractContextManager[None]] = nullcontext
