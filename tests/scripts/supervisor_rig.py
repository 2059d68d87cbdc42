"""A supervisor among doubles: no process, no socket, no real time."""

from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.server_process import StubProcess
from scripts.supervisor import Supervisor
from scripts.supervisor_contract import SupervisorSettings, Surroundings
from scripts.triton_http import ProbeResult

TOKEN = ProbeResult(alive=True, busy=False, timed_out=False, seconds=0.02, detail="one token")
BUSY = ProbeResult(alive=True, busy=True, timed_out=False, seconds=0.02, detail="queue full (503)")
LATE = ProbeResult(alive=False, busy=False, timed_out=True, seconds=2.0, detail="no token within 2 s")
DEAD = ProbeResult(alive=False, busy=False, timed_out=False, seconds=0.0, detail="stub is not healthy (400)")
STUCK = ProbeResult(
    alive=False, busy=False, timed_out=False, seconds=0.0, detail="the backend is stuck (400)", stuck=True
)


@dataclass
class FakeServer:
    stubs_of: set[str]
    code: int | None = None
    killed: bool = False
    asked: bool = False
    killed_stubs: list[str] = field(default_factory=list)
    older: list[StubProcess] = field(default_factory=list)

    def exit_code(self) -> int | None:
        return self.code

    def stubs(self) -> list[StubProcess]:
        newest = [
            StubProcess(pid=number, model=model, started=100)
            for number, model in enumerate(sorted(self.stubs_of), 2)
        ]
        return [*newest, *self.older]

    def kill_stub(self, stub: StubProcess) -> None:
        self.killed_stubs.append(stub.model)
        self.stubs_of.discard(stub.model)
        self.older = [one for one in self.older if one != stub]

    def ask_to_stop(self) -> None:
        self.asked = self.asked or self.code is None

    def wait(self, limit_s: float) -> bool:
        return self.asked

    def kill(self) -> None:
        self.killed = True
        self.code = -9 if self.code is None else self.code

    def log_tail(self) -> str:
        return "E1 the reason"


@dataclass
class FakeControl:
    """Triton over the wire; `answer` is what a probe gets, unless its model has one of its own."""

    answer: ProbeResult = TOKEN
    answers: dict[str, ProbeResult] = field(default_factory=dict)
    ready: bool = True
    reachable: bool = True
    index: dict[str, tuple[str, str]] = field(default_factory=dict)
    unloaded: set[str] = field(default_factory=set)
    counters: str = "# a page\n"
    calls: list[str] = field(default_factory=list)
    on_load: Callable[[str], None] = lambda model: None

    def server_ready(self) -> bool:
        return self.ready and self.reachable

    def repository_index(self) -> dict[str, tuple[str, str]]:
        if not self.reachable:
            raise ConnectionRefusedError
        gone = dict.fromkeys(self.unloaded, ("UNAVAILABLE", "unloaded"))
        return self.index | gone

    def load(self, model: str) -> None:
        self.calls.append(f"load {model}")
        self.on_load(model)

    def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")

    def facade_target(self, model: str) -> str | None:
        return model.removesuffix("_sync") if model.endswith("_sync") else None

    def metrics(self) -> str:
        return self.counters

    def probe(self, model: str, *, limit_s: float) -> ProbeResult:
        return self.answers.get(model, self.answer)


SETTINGS = SupervisorSettings(probe_every_s=1.0, tick_s=0.5, patience=3, ready_limit_s=10.0)


class Rig:
    """A supervisor whose clock advances by what it sleeps."""

    def __init__(
        self, *models: str, control: FakeControl | None = None, settings: SupervisorSettings = SETTINGS
    ) -> None:
        self.models = models or ("m",)
        self.control = control or FakeControl()
        self.now = 0.0
        self.events: list[str] = []
        self.servers: list[FakeServer] = []
        self.cleanups = 0
        self.mapped_by: list[frozenset[int]] = []
        self.start_fails = False
        self.on_start: Callable[[], None] = lambda: None
        self.control.index = self.control.index or dict.fromkeys(self.models, ("READY", ""))
        self.supervisor = Supervisor(
            self.models,
            start=self.start,
            cleanup=self.cleanup,
            control=self.control,
            around=Surroundings(clock=lambda: self.now, pause=self.pause, report=self.events.append),
            settings=settings,
        )

    def start(self) -> FakeServer:
        self.on_start()
        self.servers.append(FakeServer(set(self.models), code=1 if self.start_fails else None))
        return self.servers[-1]

    def cleanup(self, users: frozenset[int] | None) -> None:
        if users is not None:
            self.mapped_by.append(users)
        else:
            self.cleanups += 1

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.pause(0.5)
            self.supervisor.tick()

    def answer_after_a_restart(self, answer: ProbeResult = TOKEN) -> None:
        """What probes get once Triton was started again."""
        self.on_start = lambda: setattr(self.control, "answer", answer)

    @property
    def server(self) -> FakeServer:
        return self.servers[-1]
