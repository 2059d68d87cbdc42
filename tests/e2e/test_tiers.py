"""Two real servers that are no cluster, one real Redis, a disk: blocks return, and faults change no text."""

import contextlib
import dataclasses
import fcntl
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import lmdb
import pytest
from tritonclient.utils import InferenceServerException

from scripts.errors import TritonError
from scripts.streamed_answer import StreamedAnswer
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import TritonAddress
from tests.e2e.asking import stream
from tests.e2e.conftest import MODEL, Command, Home, Triton, make_home
from tests.e2e.test_cluster import left_behind
from tests.e2e.test_survival import stub_of
from tests.free_ports import free_ports
from tests.redis_server import RedisServer
from tests.waiting import wait_until

MAX_TOKENS = 8
BLOCK_TOKENS = 32
HOST_BYTES = 128 << 20
SETTINGS = """
[log]
level = "debug"
[redis]
url = "{url}"
call_s = 0.5
breaker_s = 1
"""
DISK = """
[lmdb]
path = "lmdb"
max_bytes = 402653184
batch_s = 0.1
"""
TOPICS = ("lighthouse", "railway", "library", "orchard")
OTHER_TOPICS = ("museum", "harbour", "market", "mountain")
STANDS_STILL_S = 3.0
ANSWERS_MEANWHILE = 8
OTHER_BYTES = "for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('SETRANGE', key, 70000, 'x') end"
"""A byte in the middle of every payload that is there."""


def prompt(topic: str) -> str:
    """About 340 tokens: ten whole blocks."""
    return " ".join(f"Line {number}: the {topic} keeper wrote about day {number}." for number in range(24))


@dataclass
class Servers:
    """`disk` has Redis and LMDB below it, `other` the same Redis."""

    disk: Triton
    other: Triton
    redis: RedisServer

    @property
    def lmdb(self) -> Path:
        return self.disk.home.root / "lmdb"

    def both(self) -> tuple[Triton, Triton]:
        return self.disk, self.other


@pytest.fixture(scope="module")
def servers(
    signed_demo: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """At the end both must stop in order and leave nothing but arenas."""
    folder, name = tmp_path_factory.mktemp("tiers"), f"e2e-tiers-{os.getpid()}"
    with RedisServer(folder, "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as redis:
        settings = SETTINGS.format(url=redis.url)
        first = home_of(folder / "disk", signed_demo, name, "node-1", settings + DISK)
        second = home_of(folder / "other", signed_demo, name, "node-2", settings)
        started: list[Triton] = []
        try:
            started += [begin(first), begin(second)]
            made = Servers(serving(started[0]), serving(started[1]), redis)
            yield made
            for triton in made.both():
                stop(triton)
        finally:
            for triton in started:
                triton.command.end()
            for arena in (*first.arenas(), *second.arenas()):
                arena.unlink()


def home_of(root: Path, signed: tuple[Path, Path, Path], cluster: str, node: str, below: str) -> Home:
    """A node of its own, with the secrets of all."""
    made = make_home(root, signed, cluster=cluster, settings={"lanes": 2, "threads": 1})
    config = root / "tensorcache.toml"
    text = config.read_text().replace('id = "node-1"', f'id = "{node}"').replace('"secrets"', '"../secrets"')
    config.write_text(text.replace(f"bytes = {512 << 20}", f"bytes = {HOST_BYTES}") + below)
    if not (root.parent / "secrets").exists():
        (root / "secrets").rename(root.parent / "secrets")
    return dataclasses.replace(made, cluster=f"{cluster}_{node}")


def begin(home: Home) -> Triton:
    """Started, and not waited for."""
    ports = free_ports(3)
    address = TritonAddress(http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2])
    command = Command(
        "serve", "--home", str(home.root), "--http-port", str(ports[0]), "--grpc-port", str(ports[1]),
        "--metrics-port", str(ports[2]), "--pause-limit", "1",
    )  # fmt: skip
    return Triton(home, address, TritonHttp(address), command)


def serving(triton: Triton) -> Triton:
    triton.command.wait_for(f"serving {MODEL}", limit_s=120)
    return triton


def stop(triton: Triton) -> None:
    """In order; no process, port or shared memory stays, but arenas."""
    command, address = triton.command, triton.address
    command.process.send_signal(signal.SIGTERM)
    assert command.rest(limit_s=60) == 0, command.lines
    assert left_behind(str(triton.home.root)) == []
    assert [name for name in os.listdir("/dev/shm") if f"tensorcache-{command.process.pid}-" in name] == []
    assert triton.home.arenas()
    for port in (address.http_port, address.grpc_port, address.metrics_port):
        with socket.socket() as door:
            assert door.connect_ex(("127.0.0.1", port)) != 0


def entries(folder: Path) -> int:
    """Blocks in a folder of LMDB that nobody has open."""
    with (folder / "writer.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with lmdb.open(str(folder / "blocks"), readonly=True, max_dbs=2) as environment:
            blocks = environment.open_db(b"blocks", create=False)
            with environment.begin(db=blocks) as transaction:
                return int(transaction.stat()["entries"])


def below(triton: Triton, name: str, *, tier: str) -> float:
    return triton.metric(f"tier_{name}", tier=tier)


def ask(triton: Triton, topic: str, **fields: object) -> StreamedAnswer:
    return stream(triton, text_input=prompt(topic), max_tokens=MAX_TOKENS, **fields)


def uncached(triton: Triton, topics: Sequence[str]) -> dict[str, str]:
    """The text of each prompt."""
    return {topic: ask(triton, topic, no_cache=True).text for topic in topics}


def come_back(triton: Triton, texts: Mapping[str, str], *, tier: str) -> None:
    """Every text is right, and the whole blocks of a prompt come from below.

    Of one prompt at least: on a busy machine a tier may be found too slow for others.
    """
    before = below(triton, "fetched_blocks_total", tier=tier)
    answers = {topic: ask(triton, topic) for topic in texts}
    assert {topic: answer.text for topic, answer in answers.items()} == texts
    whole = [topic for topic, answer in answers.items() if answer.cached_tokens >= whole_blocks(answer)]
    assert whole, "\n".join(decisions(triton))
    came = before + sum(answer.cached_tokens for answer in answers.values()) // BLOCK_TOKENS
    wait_until(lambda: below(triton, "fetched_blocks_total", tier=tier) >= came)


def whole_blocks(answer: StreamedAnswer) -> int:
    """Tokens of the prompt in whole blocks."""
    return answer.input_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def decisions(triton: Triton) -> list[str]:
    """What its log says of fetches, and of servers that do not answer."""
    lines = (triton.home.root / "triton.log").read_text(errors="replace").splitlines()
    return [line for line in lines if "tiers." in line or "breaker" in line]


def test_prompts_come_back_from_the_disk_when_the_server_was_stopped(servers: Servers) -> None:
    texts = uncached(servers.disk, TOPICS)
    computed = {topic: ask(servers.disk, topic) for topic in texts}
    assert {topic: answer.text for topic, answer in computed.items()} == texts
    assert all(whole_blocks(answer) >= 8 * BLOCK_TOKENS for answer in computed.values())
    stop(servers.disk)
    assert entries(servers.lmdb) >= 8 * len(texts)
    servers.redis.command("FLUSHALL")
    for arena in servers.disk.home.arenas():
        arena.unlink()
    servers.disk = serving(begin(servers.disk.home))
    come_back(servers.disk, texts, tier="lmdb")
    assert below(servers.disk, "fetched_blocks_total", tier="redis") == 0


def test_what_one_saw_twice_the_other_restores(servers: Servers) -> None:
    disk, other = servers.both()
    texts = uncached(other, OTHER_TOPICS)
    servers.redis.command("FLUSHALL")
    for topic in texts:
        assert ask(disk, topic).text == ask(disk, topic).text == texts[topic]
    wait_until(lambda: keys(servers.redis) >= 8 * len(texts))
    come_back(other, texts, tier="redis")


def keys(redis: RedisServer) -> int:
    return int(redis.command("DBSIZE").removeprefix(b":"))


@dataclass
class Load:
    """Each server asks what is new twice, and then what the other asked twice; every text is compared."""

    servers: Servers
    expected: dict[str, str]
    ended: threading.Event = field(default_factory=threading.Event)
    turns: list[int] = field(default_factory=lambda: [0, 0])
    answers: list[StreamedAnswer] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join(90)

    def slowest_s(self, first: int = 0) -> float:
        """Time to the first token, of answers from the given one on."""
        return max(answer.ttft_s for answer in self.answers[first:])

    def until_hits_come(self) -> None:
        """From Redis, on both servers, with their breakers closed."""
        before = [self._hits(server) for server in self.servers.both()]
        for server, hits in zip(self.servers.both(), before, strict=True):
            wait_until(lambda server=server, hits=hits: self.failed or self._hits(server) > hits)
            wait_until(lambda server=server: self.failed or below(server, "breaker_open", tier="redis") == 0)

    def _hits(self, server: Triton) -> float:
        return below(server, "fetched_blocks_total", tier="redis")

    def _run(self, number: int) -> None:
        for turn in itertools.count():
            others = f"{1 - number}-{max(0, self.turns[1 - number] - 1)}"
            for salt in (f"{number}-{turn}", f"{number}-{turn}", others):
                if self.ended.is_set():
                    return
                self._ask(number, salt)
            self.turns[number] = turn + 1

    def _ask(self, number: int, salt: str) -> None:
        topic = TOPICS[int(salt.rpartition("-")[2]) % len(TOPICS)]
        try:
            answer = ask(self.servers.both()[number], topic, cache_salt=salt)
        except (TritonError, InferenceServerException) as error:
            self.failed.append(f"server {number}: {error}")
            self.ended.wait(0.2)
            return
        self.answers.append(answer)
        if answer.text != self.expected[topic]:
            self.wrong.append(f"server {number}, {topic}: {answer.text!r}, not {self.expected[topic]!r}")


def test_every_text_is_the_uncached_one_while_redis_fails(servers: Servers) -> None:
    expected = uncached(servers.other, TOPICS)
    with Load(servers, expected) as load:
        load.until_hits_come()
        calm_s, answered = load.slowest_s(), len(load.answers)
        for fault in (stands_still, is_killed_and_comes_back_empty, loses_everything, gives_other_bytes):
            fault(servers, load)
            load.until_hits_come()
    assert load.wrong == []
    assert load.failed == []
    assert load.slowest_s(answered) <= 3 * calm_s + 1, "Redis held up requests"


def stands_still(servers: Servers, load: Load) -> None:
    """SIGSTOP, until breakers are open and answers came all the same; SIGCONT."""
    answered = len(load.answers)
    servers.redis.pause()
    try:
        time.sleep(STANDS_STILL_S)
        wait_until(lambda: all(below(one, "breaker_open", tier="redis") for one in servers.both()))
        wait_until(lambda: len(load.answers) >= answered + ANSWERS_MEANWHILE)
    finally:
        servers.redis.resume()


def is_killed_and_comes_back_empty(servers: Servers, load: Load) -> None:
    """SIGKILL; another process at the same port."""
    servers.redis.kill()
    time.sleep(1)
    servers.redis.start()


def loses_everything(servers: Servers, load: Load) -> None:
    """FLUSHALL."""
    assert servers.redis.command("FLUSHALL") == b"+OK"


def gives_other_bytes(servers: Servers, load: Load) -> None:
    """Until one of the servers met them."""
    before = sum(below(one, "corrupt_blocks_total", tier="redis") for one in servers.both())

    def met() -> bool:
        servers.redis.command("EVAL", OTHER_BYTES, "0")
        return sum(below(one, "corrupt_blocks_total", tier="redis") for one in servers.both()) > before

    wait_until(met)


def test_a_server_killed_while_it_writes_to_its_disk_finds_right_blocks_there(servers: Servers) -> None:
    disk = servers.disk
    [(topic, expected)] = uncached(disk, TOPICS[:1]).items()
    servers.redis.kill()
    data, pid = servers.lmdb / "blocks" / "data.mdb", stub_of(disk, MODEL)
    asked: list[str] = []
    stop_asking = threading.Event()

    def ask_on() -> None:
        while not stop_asking.is_set():
            asked.append(f"killed-{len(asked)}")
            with contextlib.suppress(TritonError, InferenceServerException):
                ask(disk, topic, cache_salt=asked[-1])

    asker = threading.Thread(target=ask_on)
    asker.start()
    try:
        wait_until(lambda: len(asked) > 4)
        written = os.stat(data).st_mtime_ns
        wait_until(lambda: os.stat(data).st_mtime_ns != written)  # a transaction is being written
        os.kill(pid, signal.SIGKILL)
    finally:
        stop_asking.set()
        for arena in disk.home.arenas():
            arena.unlink()
        asker.join(90)
    disk.command.wait_for("Triton is serving again", limit_s=90)
    answers = [ask(disk, topic, cache_salt=salt) for salt in asked]
    assert {answer.text for answer in answers} == {expected}
    assert sum(answer.cached_tokens > 0 for answer in answers) >= 2
    assert below(disk, "corrupt_blocks_total", tier="lmdb") == 0
