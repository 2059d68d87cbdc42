"""Starts, asks, kills, stops and continues one node's process; the controller's side of `node`."""

import contextlib
import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from tests.cluster_faults.blocks import ChainId
from tests.cluster_faults.ledger import Read
from tests.cluster_faults.network import listening_ports, real_host
from tests.cluster_faults.node import NodeOptions

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 60.0


class NodeGoneError(Exception):
    """It was killed, or has not answered in time: what was asked may have been done or not."""


class NodeProcess:
    """One node. Commands go one at a time, from any thread."""

    def __init__(
        self, number: int, options: NodeOptions, *, log: Path, twice: Callable[[ChainId, int], None]
    ) -> None:
        """`twice` hears of each block that a second failure domain acknowledged."""
        self.number = number
        self.options = options
        self._log = log
        self._twice = twice
        self._ids = itertools.count(1)
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader: threading.Thread | None = None
        self._stops = 0
        """How often it was stopped or killed: work during which this changed was disturbed."""

    @property
    def pid(self) -> int:
        """0 while it is not there."""
        process = self._process
        return 0 if process is None or process.poll() is not None else process.pid

    @property
    def died(self) -> str:
        """Empty, or its last words, if it ended and nobody killed it."""
        process = self._process
        if process is None or process.poll() is None:
            return ""
        return f"node {self.number} ended with {process.returncode}:\n{self.log_tail(80)}"

    def start(self) -> list[int]:
        """Start it on whatever it left; the ports it listens on, once it serves."""
        assert not self.pid, f"node {self.number} runs"
        with self._turn:
            self._start()
        return listening_ports(self.pid, real_host(self.number))

    def _start(self) -> None:
        text = msgspec.json.encode(self.options).decode()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster_faults.node", text],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self._answers = queue.Queue()
        arguments = (self._process.stdout, self._answers)
        self._reader = threading.Thread(target=_pass_on, args=arguments, daemon=True)
        self._reader.start()
        try:
            self._answer(0, START_LIMIT_S)
        except NodeGoneError as error:
            raise AssertionError(f"{error}:\n{self.log_tail()}") from None

    def ask(self, do: str, *, limit_s: float = 10.0, **fields: object) -> dict[str, Any]:
        """One command; NodeGoneError if there is no answer."""
        with self._turn:
            number, process = next(self._ids), self._process
            if process is None or process.stdin is None:
                raise NodeGoneError(f"node {self.number} is not there")
            try:
                process.stdin.write(json.dumps({"id": number, "do": do, **fields}) + "\n")
                process.stdin.flush()
            except (OSError, ValueError) as error:
                raise NodeGoneError(f"node {self.number}: {error}") from None
            return self._answer(number, limit_s)

    def commit(self, chain: ChainId) -> list[int]:
        """Write a chain; which of its blocks were committed."""
        committed: list[int] = self.ask("commit", chain=_words(chain))["committed"]
        return committed

    def read(self, chain: ChainId, *, deadline_s: float) -> Read:
        """Read a chain as far as it comes."""
        stops = self._stops
        answer = self.ask("read", chain=_words(chain), deadline_s=deadline_s)
        return Read(
            self.number, chain, answer["restored"], tuple(answer["wrong"]), answer["took_s"], deadline_s,
            disturbed=stops != self._stops,
        )  # fmt: skip

    def held(self, chains: Sequence[ChainId]) -> dict[ChainId, set[int]]:
        """Which blocks of these chains are in its arenas."""
        answer = self.ask("held", chains=[_words(chain) for chain in chains], limit_s=30.0)
        return {chain: set(blocks) for chain, blocks in zip(chains, answer["held"], strict=True)}

    def counters(self) -> dict[str, float]:
        """All counters of the node and of its caches."""
        counters: dict[str, float] = self.ask("counters")["counters"]
        return counters

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Nothing if it is not there."""
        self._stops += 1
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if self._reader is not None:
            self._reader.join(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was written last found nobody
                    pipe.close()

    def stop(self) -> None:
        """SIGSTOP."""
        self._stops += 1
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT. Counted before, for answers that come at once, and after, for what began until then."""
        self._stops += 1
        self._signal(signal.SIGCONT)
        self._stops += 1

    def close(self) -> int:
        """Let it end by itself; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None
        process.stdin.close()
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if self._reader is not None:
            self._reader.join(10)
        if process.stdout is not None:
            process.stdout.close()
        return code

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that it wrote."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _answer(self, number: int, limit_s: float) -> dict[str, Any]:
        answers, deadline = self._answers, time.monotonic() + limit_s
        while True:
            try:
                answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise NodeGoneError(f"node {self.number} has not answered in {limit_s:g} s") from None
            if answer is None:
                answers.put(None)  # for whoever asks next
                raise NodeGoneError(f"node {self.number} ended")
            for *chain, index in answer["twice"]:
                self._twice(ChainId(*chain), index)
            if answer["id"] == number:  # others are late answers to those who did not wait for them
                return answer


def _pass_on(source: IO[str], answers: "queue.Queue[dict[str, Any] | None]") -> None:
    """Until its end, which is None."""
    for line in source:
        with contextlib.suppress(ValueError):  # killed in the middle of a line
            answers.put(json.loads(line))
    answers.put(None)


def _words(chain: ChainId) -> list[int]:
    return [chain.format, chain.seed, chain.blocks]
