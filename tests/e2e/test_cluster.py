"""Three real servers, one cluster: what one computed the others restore, and faults change no text."""

import contextlib
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from scripts.cluster.figures import figure
from scripts.errors import TritonError
from scripts.server_process import children, living_stubs
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import TritonAddress
from tests.e2e.asking import stream
from tests.e2e.conftest import MODEL, Command, Home, Triton, command_line
from tests.waiting import wait_until

NODES = 3
TOPICS = ("lighthouse", "orchard", "railway", "library")
MAX_TOKENS = 12
BLOCK_TOKENS = 32
FAULT_S = 2.0


def prompt(topic: str) -> str:
    """About 200 tokens, so that a good part is whole blocks."""
    return " ".join(f"Line {number}: the {topic} keeper wrote about day {number}." for number in range(14))


@dataclass
class Cluster:
    """The command that runs it all, and its servers."""

    command: Command
    servers: list[Triton]
    home: Path

    def supervisor(self, number: int) -> int:
        """The process of `tensorcache serve` of a node."""
        home = str(self.home / f"node-{number + 1}")
        (pid,) = [pid for pid in children(self.command.process.pid) if home in command_line(pid)]
        return pid

    def tritonserver(self, number: int) -> int:
        (pid,) = [pid for pid in children(self.supervisor(number)) if "tritonserver" in command_line(pid)]
        return pid

    def serves(self, number: int) -> bool:
        """It gives a token and will go on doing so: Triton did not refuse a request for its process.

        See scripts.supervisor: a server that did so for a process that stood still is about to abort, however
        well it answers now. Another in its place counts from zero.
        """
        http = self.servers[number].http
        return http.probe(MODEL).alive and refusals(http.metrics()) == 0


def refusals(page: str) -> float | None:
    """Requests of the decoder that failed in Triton's own hands; None without a metrics page."""
    sample = re.compile(rf'^nv_inference_request_failure{{model="{MODEL}",reason="BACKEND".*}} (\S+)$', re.M)
    found = sample.search(page)
    return None if found is None else float(found[1])


@pytest.fixture(scope="module")
def cluster(
    signed_demo: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """At the end it must stop in order and leave nothing but arenas."""
    release, private, public = signed_demo
    home, name = tmp_path_factory.mktemp("cluster"), f"e2e-cluster-{os.getpid()}"
    first = first_port()
    command = Command(
        "cluster", "up", "--nodes", str(NODES), "--home", str(home), "--release", str(release),
        "--key", str(public), "--cluster", name, "--lanes", "2", "--http-port", str(first),
        "--grpc-port", str(first + 1), "--metrics-port", str(first + 2), "--control-port", str(first + 3),
    )  # fmt: skip
    try:
        command.wait_for("Ctrl-C stops all", limit_s=180)
        servers = []
        for number in range(NODES):
            port = first + 10 * number
            address = TritonAddress(http_port=port, grpc_port=port + 1, metrics_port=port + 2)
            node = Home(home / f"node-{number + 1}", public, private, f"{name}_node-{number + 1}")
            servers.append(Triton(node, address, TritonHttp(address), command))
        yield Cluster(command, servers, home)
        command.process.send_signal(signal.SIGTERM)
        assert command.rest(limit_s=60) == 0, command.lines
        assert [server.home.cluster for server in servers if not server.home.arenas()] == []
        assert left_behind(str(home)) == []
    finally:
        command.end()
        for arena in Path("/dev/shm").glob(f"tensorcache_{name}_*"):
            arena.unlink()


def first_port() -> int:
    """A port from which on all ports of the nodes are free; below those that outgoing connections get."""
    while True:
        first = random.randrange(10_000, 30_000)
        wanted = [first + 10 * number + one for number in range(NODES) for one in range(4)]
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in wanted:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def left_behind(home: str) -> list[str]:
    """Command lines of processes that have anything to do with these homes."""
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [line for pid in processes if home in (line := command_line(pid))]


def test_what_one_computed_the_others_restore(cluster: Cluster) -> None:
    first, *others = cluster.servers
    for server in cluster.servers:  # who was started first found nobody there, and looks again
        wait_until(lambda server=server: figure(server.http, "cluster_peers_usable") == NODES - 1)
    text = prompt("museum")
    uncached = stream(first, text_input=text, max_tokens=MAX_TOKENS, no_cache=True)
    assert (uncached.cached_tokens, uncached.input_tokens > 150) == (0, True)
    computed = stream(first, text_input=text, max_tokens=MAX_TOKENS)
    assert computed.text == uncached.text
    blocks = computed.input_tokens // BLOCK_TOKENS
    wait_until(lambda: figure(first.http, "cluster_committed2_blocks_total") >= blocks)
    for server in others:
        restored = stream(server, text_input=text, max_tokens=MAX_TOKENS)
        assert restored.text == uncached.text
        assert restored.cached_tokens >= 128, restored
    fetched = [figure(server.http, "cluster_fetched_blocks_total") or 0 for server in cluster.servers]
    given = [figure(server.http, "cluster_replicated_blocks_total") or 0 for server in cluster.servers]
    assert sum(fetched) + sum(given) > 0, "nothing travelled"


@dataclass
class Load:
    """Asks one server after the other, always something that was asked elsewhere; compares every text."""

    uncached: dict[str, str]
    ended: threading.Event = field(default_factory=threading.Event)
    down: set[int] = field(default_factory=set)
    answers: int = 0
    cached: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """What was done to the servers, and what requests were told, in the order of the clock."""

    def note(self, event: str) -> None:
        self.events.append(f"{datetime.now():%H:%M:%S.%f} {event}")

    def run(self, number: int, server: Triton) -> None:
        """Until `ended`. A request fails only because its own server is down."""
        choice = random.Random(number)
        turn, last = 0, ""
        while not self.ended.is_set():
            topic, turn = choice.choice(TOPICS), turn + 1
            was_down = number in self.down
            try:
                # some with a beginning that nobody has, some with one that others have
                salt = f"{turn // 4}"
                answer = stream(server, text_input=prompt(topic), max_tokens=MAX_TOKENS, cache_salt=salt)
            except (TritonError, InferenceServerException) as error:
                failure = f"server {number}: {error}"
                if not (was_down or number in self.down):
                    self.failed.append(failure)
                    failure += " (nothing was done to it)"
                if failure != last:
                    self.note(failure)
                last = failure
                self.ended.wait(0.2)
                continue
            self.answers += 1
            self.cached += answer.cached_tokens > 0
            if answer.text != self.uncached[topic]:
                self.wrong.append(f"server {number}, {topic}: {answer.text!r}, not {self.uncached[topic]!r}")


def test_every_text_is_the_uncached_one_while_nodes_fail(cluster: Cluster) -> None:
    first = cluster.servers[0]
    uncached = {
        topic: stream(first, text_input=prompt(topic), max_tokens=MAX_TOKENS, no_cache=True).text
        for topic in TOPICS
    }
    load = Load(uncached)
    threads = [
        threading.Thread(target=load.run, args=(number, server))
        for number, server in enumerate(cluster.servers)
    ]
    for thread in threads:
        thread.start()
    try:
        with told(cluster, load):
            wait_until(lambda: load.answers > 6 or load.failed)
            fail_in_turn(cluster, load)
            before = load.answers
            wait_until(lambda: load.answers > before + 6 or load.failed)
    finally:
        load.ended.set()
        for thread in threads:
            thread.join(90)
    with told(cluster, load):
        assert load.wrong == []
        assert load.failed == []
        assert load.cached > load.answers / 4, load


@contextlib.contextmanager
def told(cluster: Cluster, load: Load) -> Iterator[None]:
    """What fails inside comes with what was done when, and what supervisors and servers said then."""
    try:
        yield
    except AssertionError as error:
        said = [
            f"--- {log.parent.name}/{log.name}\n"
            + "".join(_TELLING.findall(log.read_text(errors="replace"))[-40:])
            for log in sorted(cluster.home.glob("node-*/*.log"))
        ]
        raise AssertionError("\n".join([str(error), "---", *load.events, *said])) from error


_TELLING = re.compile(r"^(?![|+]|I ?\d|\s*$).*\n", re.M)
"""Lines of a log that are neither information nor tables."""


def fail_in_turn(cluster: Cluster, load: Load) -> None:
    """A node that stands still, then a server that is killed with all that belongs to it.

    The first may have to be brought back too: it depends on whether it was asked while it stood still.
    """
    (stub,) = [one.pid for one in living_stubs(cluster.tritonserver(1)) if not one.model.endswith("_sync")]
    load.down.add(1)
    load.note("the process behind server 1 stands still")
    os.kill(stub, signal.SIGSTOP)
    load.ended.wait(FAULT_S)
    os.kill(stub, signal.SIGCONT)
    load.note("it goes on; server 2 is killed")
    load.down.add(2)
    killed = cluster.tritonserver(2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(killed, signal.SIGKILL)
    for number in sorted(load.down):
        wait_until(lambda number=number: cluster.serves(number), limit_s=90)
        load.note(f"server {number} serves")
    assert cluster.tritonserver(2) != killed
    load.down.clear()
