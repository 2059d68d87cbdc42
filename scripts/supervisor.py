"""Keeps one Triton alive: starts it, waits for a first token, notices death and silence, and brings it back.

Triton's own health is not enough: after the process behind a decoupled model died, Triton goes on answering
"ready" and never restarts it. So the supervisor looks at three things: is the server process there, is each
model's stub process there, does each model give a token. A model whose stub is gone is unloaded and loaded
again (a plain load of an unchanged model restarts nothing); a stuck or silent one is killed first; a server
that ended is started again.

Triton never ends the open streams of a process that is gone, not even when its model is unloaded: their
clients wait until their own limit. Only the end of the server hangs up on them. So a server whose one decoder
is gone is started again as a whole, a matter of seconds; with several decoders the others matter more.

Triton gives up what it asks of a process that stands still for a second ("Stub process … is not healthy") and
frees memory that the process reads once it goes on: then the whole server aborts, at the latest when it is
asked next. So a process that was frozen for a moment, and asked meanwhile, ends here as a server that ended.

Invariants
- A busy model is not a dead one: see liveness.
- A model that somebody unloaded stays unloaded.
- The server's own end is noticed within a tick, also while Triton is asked to load. A stub inherits Triton's
  sockets and keeps them open, so after that end a caller waits for an answer until its time is up.
- Every wait has a limit, and tries follow each other with a bounded back-off.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.attended import attended
from scripts.backoff import Backoff
from scripts.errors import TritonCrashed, TritonError
from scripts.liveness import Liveness
from scripts.server_process import StubProcess
from scripts.supervisor_contract import Control, Server, SupervisorSettings, Surroundings

_ROUND_SLACK_S = 1.0  # of a round of probes, beside the limits of each


@dataclass(slots=True)
class _Watch:
    """What is known about one model."""

    backoff: Backoff
    missing_ticks: int = 0
    retry_at: float = 0.0
    lingering: dict[int, float] = field(default_factory=dict)


class _ServerEnded(Exception):
    """Seen while something was asked of the server."""


class Supervisor:
    """One Triton and its models.

    `start` launches a server; `cleanup` removes the shared memory that none of the stubs it is given maps.
    """

    def __init__(
        self,
        models: tuple[str, ...],
        *,
        start: Callable[[], Server],
        cleanup: Callable[[frozenset[int] | None], object],
        control: Control,
        around: Surroundings,
        settings: SupervisorSettings,
    ) -> None:
        self._models = models
        self._start = start
        self._cleanup = cleanup
        self._control = control
        self._around = around
        self._settings = settings
        self._server: Server | None = None
        self._watches = self._new_watches()
        self._liveness = self._new_liveness()
        self._restarts = self._new_backoff()
        self._next_probe = 0.0
        self._late_round = False

    def bring_up(self) -> None:
        """Start Triton and return once every model gave a token; TritonError says why it did not.

        A server that a signal ended while it was starting is started once more.
        """
        try:
            self._bring_up()
        except TritonCrashed as error:
            self._around.report(f"{error}\nstarting it once more")
            self.shut_down()
            self._bring_up()

    def _bring_up(self) -> None:
        with self._around.hold():
            self._server = self._start()
        self._wait_until_ready(self._server)
        for model in self._models:
            result = self._control.probe(model, limit_s=self._settings.first_probe_limit_s)
            if not result.alive:
                raise TritonError(f"{model} is loaded but gives no token: {result.detail}")
        self._watches = self._new_watches()
        self._liveness = self._new_liveness()
        self._liveness.targets = {
            model: target for model in self._models if (target := self._control.facade_target(model))
        }
        self._next_probe = self._around.clock() + self._settings.probe_every_s

    def watch(self) -> None:
        """Look after it until the caller is interrupted; TritonError once it cannot be brought back."""
        while True:
            self._around.pause(self._settings.tick_s)
            self.tick()

    def tick(self) -> None:
        """One round of checks and the repair of what they found."""
        server = self._running()
        code = self._exit_code(server)
        if code is not None:
            self._restart(f"tritonserver ended with {code}")
            return
        try:
            self._check_stubs(server)
            if self._around.clock() >= self._next_probe:
                self._next_probe = self._around.clock() + self._settings.probe_every_s
                self._cleanup(frozenset(stub.pid for stub in server.stubs()))
                self._check_tokens(server)
                if self._liveness.in_doubt:
                    self._next_probe = self._around.clock() + self._settings.doubt_every_s
        except _ServerEnded as ended:
            self._restart(str(ended))

    def shut_down(self) -> None:
        """Stop Triton in order, by force after the limit, and remove what it left. Idempotent."""
        with self._around.hold():
            server, self._server = self._server, None
            if server is None:
                return
            try:
                server.ask_to_stop()
                server.wait(self._settings.stop_limit_s)
            finally:
                server.kill()
                self._cleanup(None)

    def _exit_code(self, server: Server) -> int | None:
        with self._around.hold():
            return server.exit_code()

    def _new_backoff(self) -> Backoff:
        return Backoff(limit_s=self._settings.pause_limit_s)

    def _new_watches(self) -> dict[str, _Watch]:
        return {model: _Watch(backoff=self._new_backoff()) for model in self._models}

    def _new_liveness(self) -> Liveness:
        return Liveness(patience=self._settings.patience, limit_s=self._settings.probe_limit_s)

    def _running(self) -> Server:
        assert self._server is not None, "bring_up comes first"
        return self._server

    def _wait_until_ready(self, server: Server) -> None:
        limit = self._around.clock() + self._settings.ready_limit_s
        while not self._control.server_ready():
            code = self._exit_code(server)
            if code is not None:
                kind = TritonCrashed if code < 0 else TritonError
                raise kind(f"tritonserver ended with {code} while starting:\n{server.log_tail()}")
            self._raise_if_refused()
            if self._around.clock() > limit:
                raise TritonError(
                    f"Triton is not ready after {self._settings.ready_limit_s:g} s:\n{server.log_tail()}"
                )
            self._around.pause(0.1)

    def _raise_if_refused(self) -> None:
        """A model that failed to load never becomes ready: say why at once."""
        index = self._index() or {}  # the endpoint may not be up yet
        for model in self._models:
            state, reason = index.get(model, ("", ""))
            if state == "UNAVAILABLE" and reason:
                raise TritonError(f"{model} does not load: {reason.splitlines()[0]}")

    def _check_stubs(self, server: Server) -> None:
        """Two rounds in a row without a stub, while Triton calls the model ready: it died."""
        stubs = server.stubs()
        for model, watch in self._watches.items():
            living = [stub for stub in stubs if stub.model == model]
            gone = not living and (self._index() or {}).get(model, ("", ""))[0] == "READY"
            watch.missing_ticks = watch.missing_ticks + 1 if gone else 0
            if watch.missing_ticks >= 2:
                self._bring_back(server, model, why="its process died")
            self._end_lingering(server, watch, sorted(living, key=lambda stub: stub.started)[:-1])

    def _end_lingering(self, server: Server, watch: _Watch, older: list[StubProcess]) -> None:
        """End processes that a newer one of their model replaced long ago.

        Triton keeps an unloaded model for ever if a client cancelled a gRPC stream that had ended already;
        the process would keep its memory and the lock on its arena.
        """
        now = self._around.clock()
        watch.lingering = {stub.pid: watch.lingering.get(stub.pid, now) for stub in older}
        for stub in older:
            if now - watch.lingering[stub.pid] >= self._settings.linger_s:
                self._around.report(f"{stub.model}: process {stub.pid} was replaced long ago; ending it")
                server.kill_stub(stub)

    def _check_tokens(self, server: Server) -> None:
        started = self._around.clock()
        index = self._index()
        probes = {
            model: self._control.probe(model, limit_s=self._settings.probe_limit_s)
            for model in self._watches
            if index is None or _should_serve(*index.get(model, ("", "")))
        }
        page = self._control.metrics() or ("" if index is None else None)
        if self._stood_still(self._around.clock() - started, probes=len(probes)):
            return
        silent = self._liveness.judge(probes, page)
        if not silent:
            return
        answers = self._index() is not None
        if not answers and self._decoders <= set(silent):
            server.kill()
            raise _ServerEnded("Triton no longer answers")
        for model in silent if answers else ():
            for stub in server.stubs():
                if stub.model == model:
                    server.kill_stub(stub)
            self._bring_back(server, model, why=f"no token: {probes[model].detail}")

    def _stood_still(self, elapsed_s: float, *, probes: int) -> bool:
        """True if it was us who were stopped meanwhile: the answers are old by now. Never twice in a row."""
        late = elapsed_s > probes * self._settings.probe_limit_s + _ROUND_SLACK_S
        self._late_round = late and not self._late_round
        return self._late_round

    @property
    def _decoders(self) -> set[str]:
        return set(self._models) - set(self._liveness.targets)

    def _index(self) -> dict[str, tuple[str, str]] | None:
        """State and reason by model, None while Triton does not answer.

        Not the readiness of a model: servers that ask the backend for it call a stuck one not ready, as if it
        had been unloaded.
        """
        try:
            return self._control.repository_index()
        except (OSError, TritonError):
            return None

    def _bring_back(self, server: Server, model: str, *, why: str) -> None:
        if self._decoders == {model}:
            server.kill()
            raise _ServerEnded(f"{model}: {why}; hung up on its clients")
        self._reload(server, model, why=why)

    def _reload(self, server: Server, model: str, *, why: str) -> None:
        watch = self._watches[model]
        if self._around.clock() < watch.retry_at:
            return
        self._around.report(f"{model}: {why}; loading it again")
        watch.retry_at = self._around.clock() + watch.backoff.next_delay(self._around.clock())
        try:
            self._while_running(server, lambda: self._control.unload(model))
            self._while_running(server, lambda: self._control.load(model))
        except TritonError as error:
            self._around.report(f"{error}; next try in {watch.retry_at - self._around.clock():.0f} s")
            return
        watch.missing_ticks = 0
        watch.backoff.recovered(self._around.clock())
        self._liveness.forget(model)
        self._around.report(f"{model}: serving again")

    def _while_running(self, server: Server, ask: Callable[[], None]) -> None:
        """Ask something of Triton that may take minutes; _ServerEnded as soon as it is not there any more."""

        def still_running() -> None:
            code = self._exit_code(server)
            if code is not None:
                raise _ServerEnded(f"tritonserver ended with {code}")
            self._around.pause(0.0)

        attended(ask, between=still_running)

    def _restart(self, why: str) -> None:
        for _ in range(self._settings.restarts):
            delay = self._restarts.next_delay(self._around.clock())
            self._around.report(f"{why}; starting Triton again in {delay:.0f} s")
            self.shut_down()
            self._around.pause(delay)
            try:
                self.bring_up()
            except TritonError as error:
                why = str(error).splitlines()[0]
                continue
            self._restarts.recovered(self._around.clock())
            self._around.report("Triton is serving again")
            return
        raise TritonError(f"gave up after {self._settings.restarts} tries to start Triton: {why}")


def _should_serve(state: str, reason: str) -> bool:
    """False for a model that was unloaded on purpose or is on its way; True for one that failed to load."""
    return state == "READY" or (state == "UNAVAILABLE" and reason != "unloaded")
